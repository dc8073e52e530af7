#include "launch/plan/rank_place.h"

#include <array>
#include <cstddef>

#include "core/base/text.h"
#include "launch/base/rank_messages.h"
#include "launch/base/shell_text.h"
#include "launch/hosts/allocation.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

// sirtakirun's first: nobody else sets them, while all others may be left from a run around this
// one. Then Open MPI's: its daemons are themselves tasks of Slurm there.
constexpr std::array<std::array<std::string_view, kPlaceVariables.size()>, 4> kNames = {
    {kPlaceVariables,
     {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
      "OMPI_COMM_WORLD_LOCAL_SIZE"},
     {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
     {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"}}};

Status Read(const core::EnvironmentView& env, std::string_view name, int min, int max, int* out) {
  const std::string text = env.Find(name).value_or("");
  const auto number = NumberFrom<int>(text, min, max);
  if (!number) {
    return {StatusCode::kInvalidArgument, std::string(name) + "=" + core::Quoted(text) +
                                              ": expected a number from " + std::to_string(min) +
                                              " to " + std::to_string(max)};
  }
  *out = *number;
  return Status::Ok();
}

// "2(x2),1" and this node's number.
Status ReadTasksOfNode(const core::EnvironmentView& env, std::string_view name, int* out) {
  std::vector<int> counts;
  Status status = ExpandCounts(env.Find(name).value_or(""), name, &counts);
  int node = 0;
  if (status.ok()) {
    status = Read(env, "SLURM_NODEID", 0, static_cast<int>(counts.size()) - 1, &node);
  }
  if (status.ok()) *out = counts[static_cast<std::size_t>(node)];
  return status;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> PlaceVariables(const RankPlace& place) {
  const std::array<int, kPlaceVariables.size()> values = {place.rank, place.size, place.local_rank,
                                                          place.local_size};
  std::vector<std::pair<std::string, std::string>> variables;
  for (std::size_t i = 0; i < values.size(); ++i) {
    variables.emplace_back(kPlaceVariables[i], std::to_string(values[i]));
  }
  return variables;
}

bool IsStartedBySirtakirun(const core::EnvironmentView& env) {
  return env.Find(kPlaceVariables[0]).has_value();
}

Status FindRank(const core::EnvironmentView& env, RankPlace* out) {
  for (const auto& names : kNames) {
    const auto& [rank, size, local_rank, local_size] = names;
    if (!env.Find(rank) || !env.Find(size)) continue;
    RankPlace place;
    Status status = Read(env, size, 1, kMaxRanks, &place.size);
    if (status.ok()) status = Read(env, rank, 0, place.size - 1, &place.rank);
    if (status.ok()) status = Read(env, local_rank, 0, place.rank, &place.local_rank);
    if (status.ok()) {
      status = &names == &kNames.back() ? ReadTasksOfNode(env, local_size, &place.local_size)
                                        : Read(env, local_size, 1, place.size, &place.local_size);
    }
    if (status.ok()) *out = place;
    return status;
  }
  return {
      StatusCode::kInvalidArgument,
      "neither OMPI_COMM_WORLD_RANK nor PMI_RANK nor SLURM_PROCID is set: this is for the ranks "
      "that sirtakirun starts"};
}

std::vector<std::pair<std::string, std::string>> TorchrunVariables(
    const RankPlace& place, const std::string& master_address, int master_port,
    const core::EnvironmentView& env) {
  return {{"RANK", std::to_string(place.rank)},
          {"WORLD_SIZE", std::to_string(place.size)},
          {"LOCAL_RANK", std::to_string(place.local_rank)},
          {"LOCAL_WORLD_SIZE", std::to_string(place.local_size)},
          {"MASTER_ADDR", env.Find("MASTER_ADDR").value_or(master_address)},
          {"MASTER_PORT", env.Find("MASTER_PORT").value_or(std::to_string(master_port))}};
}

}  // namespace sirtaki::launch
