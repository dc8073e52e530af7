// The discovery of hosts is a script of the user, which prints those that there are now. It runs again
// and again.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/base/types.h"
#include "launch/base/child.h"
#include "launch/base/loop.h"
#include "launch/hosts/host_list.h"

namespace sirtaki::launch {

// Reads what the script has printed: lines "host:slots", or "host" with `slots_per_host`; # begins a comment.
// kInvalidArgument for a line that is none: names the script. Pure.
core::Status ParseDiscovered(std::string_view text, const std::string& script, int slots_per_host,
                             HostList* out);

// Runs the script once and waits for it. Errors: kBackend, naming the script: it cannot be started,
// fails, or takes too long; those of ParseDiscovered.
core::Status DiscoverOnce(const std::string& script, int slots_per_host, HostList* out);

// One thread uses it, that of the loop.
class Discovery {
 public:
  // `complain` is told why a run has not ended well, once for runs that follow each other.
  Discovery(Loop* loop, std::string script, int slots_per_host, core::Duration interval,
            std::function<void(const std::string&)> complain);

  ~Discovery();  // kills the script, with what it has started
  Discovery(const Discovery&) = delete;
  Discovery& operator=(const Discovery&) = delete;

  // Starts the script if it is time. A script that takes too long is killed.
  void CheckTimes(core::TimePoint now);
  core::TimePoint NextTime() const { return until_; }
  // The hosts, once for each run that has ended well. After one that has not they are those from before.
  std::optional<HostList> TakeHosts(core::TimePoint now);

 private:
  void Complain(const std::string& why);

  const std::string script_;
  const int slots_per_host_;
  const core::Duration interval_;
  const std::function<void(const std::string&)> complain_;
  Child child_;
  std::string printed_;
  std::string said_;  // on standard error
  bool killed_ = false;
  std::string complaint_;  // the last
  core::TimePoint until_;  // it runs again, or is killed
};

}  // namespace sirtaki::launch
