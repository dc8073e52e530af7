// A run from its start to its end: the launcher, the ranks' connections, their output, signals.
#pragma once

#include "core/environment.h"
#include "core/types.h"
#include "launch/plan.h"

namespace sirtaki::launch {

// Carries the plan out. Returns what sirtakirun exits with: 0 if every rank ended with 0, else the
// code of the rank that failed first (128 and the signal that it died of), after telling on
// standard error which one that was. One run a process.
int RunJob(const Plan& plan, const LaunchOptions& options, const core::EnvironmentView& env,
           core::Duration start_timeout);

}  // namespace sirtaki::launch
