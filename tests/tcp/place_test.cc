#include "tcp/place.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

namespace sirtaki::tcp {
namespace {

using core::EnvironmentView;
using core::Status;

const std::string kPlaceSecret(32, 's');

EnvironmentView Variables(std::initializer_list<std::pair<std::string, std::string>> more) {
  EnvironmentView variables{{"RANK", "1"},
                            {"WORLD_SIZE", "4"},
                            {"MASTER_ADDR", "node1"},
                            {"MASTER_PORT", "29500"},
                            {"SIRTAKI_SECRET", kPlaceSecret}};
  for (const auto& [name, value] : more) variables.Set(name, value);
  return variables;
}

TEST(PlaceTest, TorchrunsVariablesAndTheSecretTellAll) {
  Place place;
  const Status status = FindPlace(Variables({}), &place);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(place.rank, 1);
  EXPECT_EQ(place.size, 4);
  EXPECT_EQ(place.address, "node1");
  EXPECT_EQ(place.port, 29500);
  EXPECT_EQ(place.secret, kPlaceSecret);
}

TEST(PlaceTest, OtherLaunchersVariablesCountWhereThoseAreNotSet) {
  const auto found = [](std::initializer_list<std::pair<std::string, std::string>> more) {
    Place place;
    const Status status = FindPlace(Variables(more), &place);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return place;
  };
  EXPECT_EQ(found({{"RANK", ""}, {"JOB_COMPLETION_INDEX", "3"}}).rank, 3);
  EXPECT_EQ(found({{"RANK", ""}, {"SLURM_PROCID", "2"}}).rank, 2);
  EXPECT_EQ(found({{"WORLD_SIZE", ""}, {"SLURM_NTASKS", "9"}}).size, 9);
  EXPECT_EQ(found({{"MASTER_PORT", ""}}).port, 29400);
  EXPECT_EQ(found({{"SIRTAKI_PORT", "77"}}).port, 77);
  // torchrun's agent listens at MASTER_PORT.
  EXPECT_EQ(found({{"TORCHELASTIC_USE_AGENT_STORE", "True"}}).port, 29501);
  EXPECT_EQ(found({{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"SIRTAKI_PORT", "77"}}).port, 77);
  const std::string file = testing::TempDir() + "/sirtaki_place_test_secret";
  std::ofstream(file) << std::string(20, 'f') << "\n";
  EXPECT_EQ(found({{"SIRTAKI_SECRET", ""}, {"SIRTAKI_SECRET_FILE", file}}).secret,
            std::string(20, 'f'));
}

TEST(PlaceTest, WhatIsMissingOrWrongIsNamedWithItsCure) {
  const struct {
    std::initializer_list<std::pair<std::string, std::string>> more;
    const char* text;
  } cases[] = {
      {{{"RANK", ""}}, "RANK is not set"},
      {{{"RANK", "4"}}, "RANK=\"4\" is no number from 0 to 3"},
      {{{"RANK", "1x"}}, "RANK=\"1x\" is no number"},
      {{{"WORLD_SIZE", ""}}, "WORLD_SIZE is not set"},
      {{{"WORLD_SIZE", "0"}}, "WORLD_SIZE=\"0\" is no number from 1 to 1048576"},
      {{{"MASTER_ADDR", ""}}, "MASTER_ADDR is not set"},
      {{{"MASTER_PORT", "65536"}}, "MASTER_PORT=\"65536\" is no number from 1 to 65535"},
      {{{"MASTER_PORT", "65535"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}, "from 1 to 65534"},
      {{{"SIRTAKI_SECRET", ""}}, "export SIRTAKI_SECRET=$(openssl rand -hex 32)"},
      {{{"SIRTAKI_SECRET", "short"}}, "SIRTAKI_SECRET has 5 characters, and needs at least 16"},
      {{{"SIRTAKI_SECRET", ""}, {"SIRTAKI_SECRET_FILE", "/no/such"}},
       "the file \"/no/such\" of SIRTAKI_SECRET_FILE cannot be read"},
  };
  for (const auto& one : cases) {
    Place place;
    const Status status = FindPlace(Variables(one.more), &place);
    EXPECT_EQ(status.code(), core::StatusCode::kInvalidArgument) << one.text;
    EXPECT_NE(status.message().find(one.text), std::string::npos) << status.ToString();
  }
}

TEST(PlaceTest, AJobOfOneRankNeedsNoAddressAndNoSecret) {
  Place place;
  EXPECT_TRUE(FindPlace({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, &place).ok());
  EXPECT_EQ(place.size, 1);
}

TEST(PlaceTest, SeveralRanksThatMeetSomewhereAreTold) {
  EXPECT_TRUE(IsToldPlace(Variables({})));
  EXPECT_TRUE(IsToldPlace(Variables({{"RANK", ""}, {"JOB_COMPLETION_INDEX", "0"}})));
  EXPECT_TRUE(IsToldPlace(Variables({{"SIRTAKI_SECRET", ""}})));  // which is an error then
  EXPECT_FALSE(IsToldPlace(Variables({{"WORLD_SIZE", "1"}})));
  EXPECT_FALSE(IsToldPlace(Variables({{"MASTER_ADDR", ""}})));
  EXPECT_FALSE(IsToldPlace({}));
}

}  // namespace
}  // namespace sirtaki::tcp
