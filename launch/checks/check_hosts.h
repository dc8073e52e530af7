// The hosts of a run are asked, over ssh and all at once, whether ranks can start there.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/base/environment.h"
#include "launch/checks/host_checks.h"

namespace sirtaki::launch {

struct HostsFound {
  std::vector<std::string> failures;  // "host b: …", in the order of the hosts
  int signal = 0;                     // came meanwhile: then not all were asked
};

// Within the patience of the wish for each host. Those that were fit within the last hour are not
// asked again, if the wish does not want it so; what cannot be kept of that is no error. Where the
// wish is to wait, hosts that are out of reach are asked again, until all answer or one is not fit;
// `tell` is called once, with a line about the first of them.
HostsFound CheckHosts(const HostWish& wish, const std::vector<std::string>& hosts,
                      const core::EnvironmentView& env,
                      const std::function<void(const std::string&)>& tell);

}  // namespace sirtaki::launch
