// Which rank a process is, by what the launchers set. Pure.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/environment.h"
#include "core/base/status.h"

namespace sirtaki::launch {

struct RankPlace {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  bool operator==(const RankPlace&) const = default;
};

// The variables by which sirtakirun tells ranks that it starts itself which they are: rank, size,
// local rank, local size.
inline constexpr std::array<std::string_view, 4> kPlaceVariables = {
    "SIRTAKI_LAUNCH_RANK", "SIRTAKI_LAUNCH_SIZE", "SIRTAKI_LAUNCH_LOCAL_RANK",
    "SIRTAKI_LAUNCH_LOCAL_SIZE"};
std::vector<std::pair<std::string, std::string>> PlaceVariables(const RankPlace& place);
bool IsStartedBySirtakirun(const core::EnvironmentView& env);

// The rank is found in the variables of sirtakirun, Open MPI, MPICH or Slurm. kInvalidArgument:
// there are none, or they make no sense: names the variable.
core::Status FindRank(const core::EnvironmentView& env, RankPlace* out);

// The variables are what torchrun would set: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
// MASTER_ADDR, MASTER_PORT. The last two as the environment has them, if it does.
std::vector<std::pair<std::string, std::string>> TorchrunVariables(
    const RankPlace& place, const std::string& master_address, int master_port,
    const core::EnvironmentView& env);

}  // namespace sirtaki::launch
