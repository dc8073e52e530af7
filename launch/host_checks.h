// Whether a host is fit for ranks, by what ssh and the sirtakirun there say; and for how long that
// is believed. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"
#include "launch/host_report.h"
#include "launch/launcher.h"
#include "launch/options.h"
#include "launch/plan.h"
#include "launch/run_commands.h"

namespace sirtaki::launch {

// What hosts are asked, and what they must answer.
struct HostWish {
  LaunchOptions options;
  Launcher launcher;
  std::string self;                                        // the path of sirtakirun
  std::string folder;                                      // that ranks start in
  std::vector<std::pair<std::string, std::string>> paths;  // search paths that ranks have
  core::Duration patience{};
};

// The paths are those of the plan, else of the environment.
HostWish WishOfPlan(const PlanInput& input, const Plan& plan, const std::string& folder,
                    core::Duration patience);

// The command that asks the host.
std::vector<std::string> AskingWords(const HostWish& wish, const std::string& host);

// What came of it. None if ranks can start there, else cause and cure; `here` is this machine's
// report.
std::optional<std::string> JudgeHost(const HostWish& wish, const std::string& host,
                                     const HostReport& here, const CommandOutcome& outcome);

// Hosts that were found to be fit within the last hour, by what they were asked.
class HostCache {
 public:
  // `now`: seconds of the calendar. Lines that are old, of the future or no lines of ours are
  // passed over.
  HostCache(std::string_view text, std::int64_t now);

  static std::string KeyOf(const HostWish& wish, const std::string& host);
  bool Knows(const std::string& key) const { return seen_.contains(key); }
  void Add(const std::string& key) { seen_[key] = now_; }
  std::string Text() const;

 private:
  std::int64_t now_;
  std::map<std::string, std::int64_t> seen_;
};

}  // namespace sirtaki::launch
