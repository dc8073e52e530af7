// An elastic job goes on when ranks or hosts come or go. Its membership decides who takes part; the job
// carries that out: it starts workers on hosts, hears from each what becomes of it, and tells the
// programs their places.
#pragma once

#include "core/base/environment.h"
#include "launch/elastic/membership.h"
#include "launch/options/options.h"
#include "launch/plan/placement.h"
#include "launch/plan/plan.h"

namespace sirtaki::launch {

// Runs the job to its end. The result is the exit code of sirtakirun.
int RunElasticJob(const Plan& plan, const LaunchOptions& options, const ThisMachine& machine,
                  const core::EnvironmentView& env, const ElasticLimits& limits);

}  // namespace sirtaki::launch
