#include "launch/plan/rank_place.h"

#include <gtest/gtest.h>

namespace sirtaki::launch {
namespace {

std::string Found(const core::EnvironmentView& env) {
  RankPlace place;
  const core::Status status = FindRank(env, &place);
  if (!status.ok()) return status.message();
  return std::to_string(place.rank) + "/" + std::to_string(place.size) + " " +
         std::to_string(place.local_rank) + "/" + std::to_string(place.local_size);
}

TEST(RankPlaceTest, ReadsOpenMpi) {
  EXPECT_EQ(Found({{"OMPI_COMM_WORLD_RANK", "5"},
                   {"OMPI_COMM_WORLD_SIZE", "8"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}),
            "5/8 1/4");
}

TEST(RankPlaceTest, ReadsMpich) {
  EXPECT_EQ(Found({{"PMI_RANK", "2"},
                   {"PMI_SIZE", "3"},
                   {"MPI_LOCALRANKID", "0"},
                   {"MPI_LOCALNRANKS", "1"}}),
            "2/3 0/1");
}

TEST(RankPlaceTest, ReadsSlurm) {
  EXPECT_EQ(Found({{"SLURM_PROCID", "4"},
                   {"SLURM_STEP_NUM_TASKS", "5"},
                   {"SLURM_LOCALID", "0"},
                   {"SLURM_NODEID", "2"},
                   {"SLURM_STEP_TASKS_PER_NODE", "2(x2),1"}}),
            "4/5 0/1");
}

TEST(RankPlaceTest, OpenMpisDaemonsMayBeTasksOfSlurm) {
  EXPECT_EQ(Found({{"SLURM_PROCID", "0"},
                   {"SLURM_STEP_NUM_TASKS", "2"},
                   {"OMPI_COMM_WORLD_RANK", "3"},
                   {"OMPI_COMM_WORLD_SIZE", "4"},
                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
            "3/4 1/2");
}

TEST(RankPlaceTest, WhatSirtakirunSaysWinsOverWhatIsLeftOfOthers) {
  const RankPlace place{5, 8, 1, 3};
  core::EnvironmentView env = {{"OMPI_COMM_WORLD_RANK", "3"},
                               {"OMPI_COMM_WORLD_SIZE", "4"},
                               {"PMI_RANK", "0"},
                               {"PMI_SIZE", "2"},
                               {"SLURM_PROCID", "0"},
                               {"SLURM_STEP_NUM_TASKS", "2"},
                               {"RANK", "1"},
                               {"WORLD_SIZE", "2"}};
  EXPECT_FALSE(IsStartedBySirtakirun(env));
  for (const auto& [name, value] : PlaceVariables(place)) env.Set(name, value);
  EXPECT_TRUE(IsStartedBySirtakirun(env));
  EXPECT_EQ(Found(env), "5/8 1/3");
}

TEST(RankPlaceTest, NamesTheVariableThatMakesNoSense) {
  EXPECT_EQ(Found({}),
            "neither OMPI_COMM_WORLD_RANK nor PMI_RANK nor SLURM_PROCID is set: this is for the "
            "ranks that sirtakirun starts");
  EXPECT_EQ(Found({{"PMI_RANK", "3"}, {"PMI_SIZE", "3"}}),
            "PMI_RANK=\"3\": expected a number from 0 to 2");
  EXPECT_EQ(Found({{"PMI_RANK", "x"}, {"PMI_SIZE", "0"}}),
            "PMI_SIZE=\"0\": expected a number from 1 to 1048576");
  EXPECT_EQ(Found({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}),
            "MPI_LOCALRANKID=\"\": expected a number from 0 to 1");
  EXPECT_EQ(Found({{"SLURM_PROCID", "1"},
                   {"SLURM_STEP_NUM_TASKS", "2"},
                   {"SLURM_LOCALID", "0"},
                   {"SLURM_NODEID", "1"},
                   {"SLURM_STEP_TASKS_PER_NODE", "2"}}),
            "SLURM_NODEID=\"1\": expected a number from 0 to 0");
}

TEST(RankPlaceTest, TheUsersMasterAddressWins) {
  const RankPlace place{5, 8, 1, 4};
  using Variables = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(TorchrunVariables(place, "10.0.0.1", 29500, {}), (Variables{{"RANK", "5"},
                                                                        {"WORLD_SIZE", "8"},
                                                                        {"LOCAL_RANK", "1"},
                                                                        {"LOCAL_WORLD_SIZE", "4"},
                                                                        {"MASTER_ADDR", "10.0.0.1"},
                                                                        {"MASTER_PORT", "29500"}}));
  const auto own =
      TorchrunVariables(place, "10.0.0.1", 29500, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "7"}});
  EXPECT_EQ(own[4].second, "a");
  EXPECT_EQ(own[5].second, "7");
}

}  // namespace
}  // namespace sirtaki::launch
