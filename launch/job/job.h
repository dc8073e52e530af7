// A run from its start to its end: the launcher, the ranks' connections, their output, signals.
#pragma once

#include <string>
#include <vector>

#include "core/base/environment.h"
#include "core/base/types.h"
#include "launch/plan/plan.h"

namespace sirtaki::launch {

struct JobResult {
  // The code is what sirtakirun exits with: 0 if every rank ended with 0 and what they said could
  // be written, else the code of the rank that failed first (128 and the signal that it died of).
  int code = 0;
  bool may_help = false;          // to start again
  std::vector<std::string> gone;  // hosts that were lost, as the plan calls them
};

// Carries the plan out, and tells on standard error what went wrong. `again`: files that ranks
// write go on. One run at a time.
JobResult RunJob(const Plan& plan, const LaunchOptions& options, bool again,
                 const core::EnvironmentView& env, core::Duration start_timeout);

}  // namespace sirtaki::launch
