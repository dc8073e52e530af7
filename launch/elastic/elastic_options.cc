#include "launch/elastic/elastic_options.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "core/base/text.h"
#include "core/base/words.h"
#include "launch/base/rank_messages.h"
#include "launch/elastic/discovery.h"
#include "launch/hosts/host_list.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

Status PrepareElastic(LaunchOptions* options, bool in_allocation) {
  const int wanted = std::max({options->np, options->max_np, options->min_np});
  if (!options->host_discovery_script.empty()) {
    HostList hosts;
    Status status = DiscoverOnce(options->host_discovery_script, options->slots_per_host, &hosts);
    if (!status.ok()) return status;
    if (hosts.empty()) {
      return {StatusCode::kInvalidArgument, "--host-discovery-script " +
                                                core::Quoted(options->host_discovery_script) +
                                                " names no host to begin with"};
    }
    options->hosts = HostsText(hosts);
  } else if (options->hosts.empty() && options->hostfile.empty() && !in_allocation) {
    if (options->np == 0 && options->max_np == 0) return Status::Ok();  // the plan complains
    options->hosts = "localhost:" + std::to_string(wanted);
  }
  // The plan has a rank for each slot: spare ones are for what is lost.
  options->np = 0;
  return Status::Ok();
}

Status LimitsOf(const LaunchOptions& options, int slots, core::Duration start_timeout,
                const core::EnvironmentView& env, ElasticLimits* out) {
  ElasticLimits limits;
  const bool may_grow = !options.host_discovery_script.empty();
  const int most = options.max_np > 0 ? options.max_np : options.np;
  limits.min_ranks = options.min_np;
  limits.max_ranks = most > 0 ? most : may_grow ? kMaxRanks : slots;
  if (!may_grow && slots < limits.min_ranks) {
    return {StatusCode::kInvalidArgument, options.Called("min-np") + " " +
                                              std::to_string(limits.min_ranks) +
                                              ": the hosts have " + core::CountText(slots, "slot")};
  }
  if (options.reset_limit >= 0) limits.resets = options.reset_limit;
  int timeout = options.elastic_timeout;
  if (timeout == 0) {
    const std::string name = "HOROVOD_ELASTIC_TIMEOUT";
    const std::string text = env.Find(name).value_or("600");
    timeout = core::NumberFrom<int>(text, 1, kMostSeconds).value_or(0);
    if (timeout == 0) {
      return {StatusCode::kInvalidArgument,
              name + "=" + text + ": allowed is 1 to " + std::to_string(kMostSeconds) + " seconds"};
    }
  }
  limits.timeout = std::chrono::seconds(timeout);
  limits.join_timeout = start_timeout + std::chrono::seconds(5);
  limits.cooldown_least = std::chrono::seconds(options.cooldown_range[0]);
  limits.cooldown_most = std::chrono::seconds(options.cooldown_range[1]);
  *out = limits;
  return Status::Ok();
}

std::vector<HostSlots> SlotsOfEach(const HostList& hosts) {
  std::vector<HostSlots> slots;
  for (const Host& host : hosts) slots.push_back({host.name, host.slots});
  return slots;
}

}  // namespace sirtaki::launch
