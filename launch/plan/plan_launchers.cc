#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "launch/base/shell_text.h"
#include "launch/plan/plan_impl.h"

namespace sirtaki::launch {
namespace {

const char* const kNoBinding = "a rank's threads must not share one core";
const char* const kInOrder = "hosts are filled one after the other";
const char* const kForSsh = "for ssh, where it is used";
const char* const kDomains = "hosts are named with their domains";
const char* const kRoot = "this is root";
const char* const kYield = "there are more ranks than cores: a rank that waits yields";

std::vector<std::string> Prefixed(const std::string& flag, const std::vector<std::string>& values) {
  std::vector<std::string> words;
  for (const std::string& value : values) words.insert(words.end(), {flag, value});
  return words;
}

void AddBinding(PlanWriter* writer, const std::vector<std::string>& none) {
  const bool given = !writer->options().binding_args.empty();
  writer->Add(given ? writer->options().binding_args : none, given ? "--binding-args" : kNoBinding);
}

// Open MPI's versions have these words alike.
void AddOpenMpiHead(PlanWriter* writer) {
  const Placement& placement = writer->placement();
  writer->Add({"-np", std::to_string(placement.ranks)}, placement.ranks_from);
  writer->Add({"-H", HostsText(placement.hosts)}, placement.from);
}

void AddOpenMpiTail(PlanWriter* writer) {
  if (writer->input().is_root) writer->Add({"--allow-run-as-root"}, kRoot);
  if (writer->CoresAreShared()) writer->Add({"--mca", "mpi_yield_when_idle", "1"}, kYield);
  if (writer->placement().local) return;
  const Networks& networks = writer->networks();
  if (!networks.include.empty()) {
    writer->Add({"--mca", "btl_tcp_if_include", networks.include}, networks.why);
  } else if (!networks.exclude.empty()) {
    writer->Add({"--mca", "btl_tcp_if_exclude", networks.exclude}, networks.why);
  }
  writer->Add(Prefixed("-x", writer->Travelling()), "variables that the ranks of all hosts need");
}

std::string NamesOfRanks(const Placement& placement) {
  const std::vector<int> counts = RanksOfHosts(placement);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    names.insert(names.end(), static_cast<std::size_t>(counts[i]), placement.hosts[i].name);
  }
  return Joined(names, ",");
}

// Whether a host's name has a domain: unless it is told not to, Open MPI 4 leaves it away, starts
// ssh to what is left, and takes node1.other for node1.
bool DomainsMatter(const PlanWriter& writer) {
  const std::vector<Host>& hosts = writer.placement().hosts;
  return std::any_of(hosts.begin(), hosts.end(), [&writer](const Host& host) {
    return !IsAddress(host.name) && host.name.find('.') != std::string::npos &&
           !IsThisMachine(host.name, writer.input().machine);
  });
}

// Where a process may not read another's memory, Open MPI 4 prints an error for every large
// message.
void AvoidSingleCopy(PlanWriter* writer) {
  const auto scope = writer->input().read("/proc/sys/kernel/yama/ptrace_scope");
  if (!scope || NumberFrom<int>(scope->substr(0, 1), 2, 9) == std::nullopt) return;
  writer->Add({"--mca", "btl_vader_single_copy_mechanism", "none"},
              "processes may not read each other's memory here");
}

// Tells mpirun itself of the hosts, by parameters whose names changed with Open MPI 5.
void AddParameters(PlanWriter* writer, const std::string& flag, const std::string& ssh,
                   const std::string& domains, const std::string& interfaces) {
  if (!writer->placement().local) writer->Add({flag, ssh, writer->SshWord()}, kForSsh);
  if (DomainsMatter(*writer)) writer->Add({flag, domains, "1"}, kDomains);
  if (const Networks& networks = writer->networks(); !networks.include.empty()) {
    writer->Add({flag, interfaces, networks.include}, networks.why);
  }
}

}  // namespace

void AddOpenMpi4(PlanWriter* writer) {
  AddOpenMpiHead(writer);
  writer->Add({"--map-by", "slot"}, kInOrder);
  AddBinding(writer, {"--bind-to", "none"});
  if (writer->placement().oversubscribed) writer->Add({"--oversubscribe"}, "--oversubscribe");
  AvoidSingleCopy(writer);
  AddParameters(writer, "--mca", "plm_rsh_args", "orte_keep_fqdn_hostnames", "oob_tcp_if_include");
  AddOpenMpiTail(writer);
}

void AddOpenMpi5(PlanWriter* writer) {
  AddOpenMpiHead(writer);
  const bool oversubscribed = writer->placement().oversubscribed;
  writer->Add({"--map-by", oversubscribed ? "slot:OVERSUBSCRIBE" : "slot"},
              std::string(kInOrder) + (oversubscribed ? "; --oversubscribe" : ""));
  AddBinding(writer, {"--bind-to", "none"});
  AddParameters(writer, "--prtemca", "plm_ssh_args", "prte_keep_fqdn_hostnames", "prte_if_include");
  AddOpenMpiTail(writer);
}

void AddHydra(PlanWriter* writer) {
  const bool is_intels = writer->input().launcher.kind == LauncherKind::kIntel;
  const Placement& placement = writer->placement();
  const LaunchOptions& options = writer->options();
  // Hydra starts its daemons by Slurm or LSF in a job of theirs, and these words would be theirs.
  const bool uses_ssh = writer->UsesSsh() || placement.system == BatchSystem::kPbs;
  if (uses_ssh && !placement.local) {
    writer->SetForLauncher(
        is_intels ? "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS" : "HYDRA_LAUNCHER_EXTRA_ARGS",
        writer->SshWord(), kForSsh);
  }
  // It takes names alone, which hosts may not have in common: so only what was given.
  const std::vector<std::string>& given = options.network_interfaces;
  if (!placement.local && !given.empty()) {
    writer->Set("FI_TCP_IFACE", given.front(), writer->networks().why);
  }
  writer->Add({"-n", std::to_string(placement.ranks)}, placement.ranks_from);
  // Intel's takes a host once for each rank.
  writer->Add({"-hosts", is_intels ? NamesOfRanks(placement) : HostsText(placement.hosts)},
              placement.from);
  if (!is_intels || !options.binding_args.empty()) {
    AddBinding(writer, {"-bind-to", "none"});
  } else if (!writer->input().environment.Find("I_MPI_PIN")) {
    writer->Set("I_MPI_PIN", "off", kNoBinding);
  }
  if (writer->UsesSsh()) writer->Add({"-launcher", "ssh"}, "the hosts are reached by ssh");
  if (placement.local) return;
  if (!given.empty()) writer->Add({"-iface", given.front()}, writer->networks().why);
  if (!options.ChoosesFolder()) {
    writer->Add(
        {"-wdir", "/"},
        "on a host without this folder MPICH would start nothing: ranks go there themselves");
  }
  writer->Add({"-genvlist", Joined(writer->Travelling(), ",")},
              "variables that the ranks of all hosts need");
}

// srun fills the job's hosts in its own order, and knows one number of tasks for all of them: what
// it cannot do is refused. `*per_host`: that number; 0: what the job has.
core::Status CheckForSrun(const Placement& placement, int* per_host) {
  const auto wrong = [](const std::string& text) {
    return core::Status(core::StatusCode::kInvalidArgument, text);
  };
  if (placement.system != BatchSystem::kSlurm) {
    return wrong(
        "srun needs a job of Slurm, and this is not one: start sirtakirun within salloc or "
        "sbatch, or choose another --launcher");
  }
  bool as_allocated = true;
  bool all_alike = true;
  auto next = placement.allocated.begin();
  for (const Host& host : placement.hosts) {
    if (!host.devices.empty()) {
      return wrong(
          "srun cannot choose slots of a host, as --include or --exclude ask for: name "
          "whole hosts, or choose another --launcher");
    }
    next = std::find_if(next, placement.allocated.end(),
                        [&host](const Host& one) { return one.name == host.name; });
    if (next == placement.allocated.end()) {
      return wrong("srun takes the hosts of the job in its order, " +
                   HostsText(placement.allocated) + ", and not " + HostsText(placement.hosts) +
                   ": name them so, or choose another --launcher");
    }
    as_allocated = as_allocated && host.slots == (next++)->slots;
    all_alike = all_alike && host.slots == placement.hosts.front().slots;
  }
  if (!as_allocated && !all_alike) {
    return wrong("srun cannot start " + HostsText(placement.hosts) + " in a job of " +
                 HostsText(placement.allocated) +
                 ": give all hosts equally many slots, or choose another --launcher");
  }
  *per_host = as_allocated || placement.oversubscribed ? 0 : placement.hosts.front().slots;
  return core::Status::Ok();
}

core::Status AddSrun(PlanWriter* writer) {
  const Placement& placement = writer->placement();
  int per_host = 0;
  core::Status status = CheckForSrun(placement, &per_host);
  if (!status.ok()) return status;
  std::vector<std::string> names;
  for (const Host& host : placement.hosts) names.push_back(host.name);
  if (const Networks& networks = writer->networks(); !networks.include.empty()) {
    writer->Set("OMPI_MCA_btl_tcp_if_include", networks.include, networks.why);
  } else if (!networks.exclude.empty()) {
    writer->Set("OMPI_MCA_btl_tcp_if_exclude", networks.exclude, networks.why);
  }
  writer->Add({"-n", std::to_string(placement.ranks)}, placement.ranks_from);
  writer->Add({"-N", std::to_string(names.size()), "--nodelist", Joined(names, ",")},
              placement.from);
  if (per_host > 0) {
    writer->Add({"--ntasks-per-node=" + std::to_string(per_host)}, "the slots of each host");
  }
  writer->Add({"--distribution=block"}, kInOrder);
  writer->Add({"--mpi=pmix"}, "what MPI needs to find the other ranks");
  AddBinding(writer, {"--cpu-bind=none"});
  if (placement.oversubscribed) writer->Add({"--overcommit"}, "--oversubscribe");
  writer->Add({"--kill-on-bad-exit=1"}, "a rank's death ends the others");
  writer->Add({"--input=0"}, "rank 0 reads the input, as under mpirun");
  writer->Add({"--export=ALL"}, "the ranks have this environment");
  return core::Status::Ok();
}

// What is for an MPI's launcher would be lost.
core::Status CheckForOwn(const PlanWriter& writer) {
  const LaunchOptions& options = writer.options();
  const std::string& why = writer.input().launcher.why;
  const auto refuse = [&](const char* flag, const std::string& more) {
    return core::Status(core::StatusCode::kInvalidArgument,
                        options.Called(flag) +
                            " is for an MPI's launcher, and sirtakirun starts the ranks itself" +
                            (why.empty() ? "" : ", " + why) + ": leave it out" + more);
  };
  if (!options.mpi_args.empty()) return refuse("mpi-args", "");
  if (!options.binding_args.empty()) {
    return refuse("binding-args", ", or bind them by a program before yours, as numactl");
  }
  return core::Status::Ok();
}

core::Status AddOwn(PlanWriter* writer) {
  if (core::Status status = CheckForOwn(*writer); !status.ok()) return status;
  const LaunchOptions& options = writer->options();
  const Placement& placement = writer->placement();
  HostList hosts = placement.hosts;
  std::vector<std::string> here;
  const std::vector<int> counts = RanksOfHosts(placement);
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    hosts[i].slots = counts[i];
    if (IsThisMachine(hosts[i].name, writer->input().machine)) here.push_back(hosts[i].name);
  }
  writer->Add({std::string(kLauncherFlag), "-H", HostsText(hosts)},
              CountText(placement.ranks, "rank") + ", " + placement.ranks_from + "; " +
                  placement.from + "; " + kInOrder +
                  (placement.oversubscribed ? "; --oversubscribe" : ""));
  if (!here.empty()) {
    writer->Add({"--here", Joined(here, ",")}, "this machine, where no ssh is needed");
  }
  if (placement.local) return core::Status::Ok();
  const auto seconds =
      std::chrono::ceil<std::chrono::seconds>(writer->input().start_timeout).count();
  writer->Add({"--ssh-timeout", std::to_string(std::max<std::int64_t>(1, seconds - 1))},
              "a second less than --start-timeout: ssh says more of a host that does not answer");
  const std::vector<std::string> ssh = SshArguments(options);
  if (ssh.size() > 2) {  // it is told in any case that nobody answers it
    writer->Add({"--ssh-args", ShellLine({ssh.begin() + 2, ssh.end()})}, "for ssh");
  }
  writer->Add(Prefixed("-x", writer->Travelling()), "variables that the ranks of all hosts need");
  return core::Status::Ok();
}

}  // namespace sirtaki::launch
