// Which hosts a run has, and how many ranks. Pure.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/base/environment.h"
#include "core/base/status.h"
#include "core/machine/cgroup.h"
#include "launch/hosts/allocation.h"
#include "launch/hosts/host_list.h"
#include "launch/options/options.h"
#include "launch/plan/routes.h"

namespace sirtaki::launch {

// The machine that sirtakirun runs on.
struct ThisMachine {
  std::string name;       // as `hostname` says
  int cores = 1;          // that this process may use
  std::string full_name;  // with its domain, if it is known
  std::vector<Interface> interfaces;
};

struct Placement {
  HostList hosts;                           // those that get ranks, in order
  std::string from;                         // where they stand: "-H", "SLURM_JOB_NODELIST", …
  BatchSystem system = BatchSystem::kNone;  // of the job that this is
  HostList allocated;                       // by it
  int ranks = 0;
  std::string ranks_from;
  bool oversubscribed = false;
  bool local = false;  // this machine alone
};

// Hosts from the options, else of the batch system's job, else this machine; without those that are
// `gone`, and then with no more ranks than the others have slots. kInvalidArgument: what they say
// is wrong, there are more ranks than slots, or no host is left.
core::Status Place(const LaunchOptions& options, const core::EnvironmentView& env,
                   const core::FileReader& read, const ThisMachine& machine,
                   const std::vector<std::string>& gone, Placement* out);

// The host of the rank, by its place in the list: hosts are filled one after the other. None if
// there are more ranks than slots.
const Host* HostOfRank(const Placement& placement, int rank);

// How many ranks each host of the list gets. Hosts are filled one after the other; where there are
// more ranks than slots, each gets its share of them.
std::vector<int> RanksOfHosts(const Placement& placement);

// "localhost", an address of the loopback or of one of its interfaces, or the machine's name with
// its own domain, with the first parts of that, or without it.
bool IsThisMachine(std::string_view host, const ThisMachine& machine);

}  // namespace sirtaki::launch
