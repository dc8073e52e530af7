// A plan is what is started: a command line and its environment, with the reason of each choice.
// Pure: the same input gives the same plan, and nothing is started here.
#pragma once

#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/environment.h"
#include "core/base/status.h"
#include "core/base/types.h"
#include "core/machine/cgroup.h"
#include "launch/hosts/launcher.h"
#include "launch/options/options.h"
#include "launch/plan/placement.h"
#include "launch/plan/routes.h"

namespace sirtaki::launch {

// Where the ranks find sirtakirun, and by what it knows them: set when it listens.
inline constexpr std::string_view kAddressVariable = "SIRTAKI_LAUNCH_ADDRESS";
inline constexpr std::string_view kKeyVariable = "SIRTAKI_LAUNCH_KEY";
// The network between the hosts, "10.0.0.0/24", if it was found by the routes.
inline constexpr std::string_view kNetworkVariable = "SIRTAKI_LAUNCH_NETWORK";
// The folder that sirtakirun was started in.
inline constexpr std::string_view kFolderVariable = "SIRTAKI_LAUNCH_FOLDER";
// The job is elastic.
inline constexpr std::string_view kElasticJobVariable = "SIRTAKI_LAUNCH_ELASTIC";
// What the ranks' programs are given unless they have it: over what they talk, and a secret that all
// ranks of a run share and nobody else.
inline constexpr std::string_view kMediumVariable = "SIRTAKI_MEDIUM";
inline constexpr std::string_view kSecretVariable = "SIRTAKI_SECRET";
// sirtakirun as it stands around a rank's program.
inline constexpr std::string_view kRankFlag = "--as-rank";
// sirtakirun as it starts the ranks where no MPI does.
inline constexpr std::string_view kLauncherFlag = "--as-launcher";

struct PlanInput {
  LaunchOptions options;
  core::EnvironmentView environment;
  core::FileReader read;
  ThisMachine machine;
  bool is_root = false;
  Launcher launcher;
  std::string self;  // the path of sirtakirun
  core::Duration start_timeout = std::chrono::seconds(30);
  RouteFinder route;  // empty: nobody is asked for routes
  // Earlier attempts: how many there were, and the hosts that were lost.
  int restarts = 0;
  std::vector<std::string> gone;
};

struct Reason {
  std::string what;
  std::string why;
};

struct Plan {
  Placement placement;
  std::vector<std::string> command;
  bool own =
      false;  // sirtakirun starts the ranks itself: the command is it as kLauncherFlag has it
  // Set for the launcher, over its own environment.
  std::vector<std::pair<std::string, std::string>> environment;
  std::set<std::string> secret;  // variables whose values PlanText does not print: those of -x
  std::vector<Reason> reasons;
  std::vector<std::string> interfaces;  // of this machine, that ranks reach it by; empty: any
  std::string network;                  // between the hosts, in a few words; empty: none matters
  std::vector<std::string> to_check;    // hosts that ssh will reach, but for those that nobody asks
  core::Duration wait{};                // how long these may be out of reach until they answer
};

// kInvalidArgument: the options are wrong for these hosts or this launcher. On error `*out` is as
// it was.
core::Status MakePlan(const PlanInput& input, Plan* out);

// The arguments of ssh to the hosts, as the options have them.
std::vector<std::string> SshArguments(const LaunchOptions& options);

// The line as a shell would take it (`NAME=...` where the value may be secret), and the reasons below
// it.
std::string PlanText(const Plan& plan);

}  // namespace sirtaki::launch
