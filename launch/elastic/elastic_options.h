// The flags of an elastic job become its hosts and its limits.
#pragma once

#include <vector>

#include "core/base/environment.h"
#include "core/base/status.h"
#include "core/base/types.h"
#include "launch/elastic/membership.h"
#include "launch/hosts/host_list.h"
#include "launch/options/options.h"

namespace sirtaki::launch {

// Sets what a plan needs: the hosts that the script names, and a rank for each slot. `in_allocation`: a
// batch system has given this job hosts. Errors: those of DiscoverOnce.
core::Status PrepareElastic(LaunchOptions* options, bool in_allocation);

// The limits of the job with these slots. kInvalidArgument: the options allow no such job, or
// HOROVOD_ELASTIC_TIMEOUT is no number of seconds. Pure.
core::Status LimitsOf(const LaunchOptions& options, int slots, core::Duration start_timeout,
                      const core::EnvironmentView& env, ElasticLimits* out);

std::vector<HostSlots> SlotsOfEach(const HostList& hosts);

}  // namespace sirtaki::launch
