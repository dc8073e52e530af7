// Whether a host is fit for ranks, by what ssh and the sirtakirun there say. Pure.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/types.h"
#include "launch/base/run_commands.h"
#include "launch/checks/host_report.h"
#include "launch/hosts/launcher.h"
#include "launch/options/options.h"
#include "launch/plan/plan.h"

namespace sirtaki::launch {

// A wish is what hosts are asked, and what they must answer.
struct HostWish {
  LaunchOptions options;
  Launcher launcher;
  std::string self;                                        // the path of sirtakirun
  std::string folder;                                      // that ranks start in
  std::vector<std::pair<std::string, std::string>> paths;  // search paths that ranks have
  core::Duration patience{};
  core::Duration wait{};  // how long a host may be out of reach
};

// The paths are those of the plan, else of the environment.
HostWish WishOfPlan(const PlanInput& input, const Plan& plan, const std::string& folder,
                    core::Duration patience);

// The words are those of the command that asks the host. `error` is what ssh has printed when it was asked before.
std::vector<std::string> AskingWords(const HostWish& wish, const std::string& host,
                                     const std::string& error = "");

// Whether the host was out of reach as one that is starting is.
bool IsOutOfReach(const CommandOutcome& outcome);

// Judges what came of it. None if ranks can start there, else cause and cure; `here` is this
// machine's report.
std::optional<std::string> JudgeHost(const HostWish& wish, const std::string& host,
                                     const HostReport& here, const CommandOutcome& outcome);

}  // namespace sirtaki::launch
