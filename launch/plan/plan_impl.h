// How each launcher is spoken to. For plan.cc.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "launch/base/shell_text.h"
#include "launch/plan/plan.h"

namespace sirtaki::launch {

struct Networks {
  std::vector<std::string> interfaces;  // of this machine
  std::string subnet;                   // of all hosts, if it was found by the routes
  // MPI is told these: names of interfaces, or a subnet; at most one of these is not empty.
  std::string include;
  std::string exclude;
  std::string why;
  std::string why_not;  // it is told nothing
  std::string avoided;  // by NCCL, where no network is chosen: beginnings of interfaces' names
  std::string text;     // in a few words; empty if nobody was asked
};
Networks ChooseNetworks(const PlanInput& input, const Placement& placement);

// A plan while it is put together.
class PlanWriter {
 public:
  PlanWriter(const PlanInput& input, Networks networks, Plan* plan)
      : input_(input), networks_(std::move(networks)), plan_(*plan) {}

  const PlanInput& input() const { return input_; }
  const LaunchOptions& options() const { return input_.options; }
  const Placement& placement() const { return plan_.placement; }
  const Networks& networks() const { return networks_; }

  // More words of the command line. Without a reason, they belong to the words before.
  void Add(const std::vector<std::string>& words, const std::string& why);
  // A variable of the launcher and all ranks.
  void Set(const std::string& name, const std::string& value, const std::string& why);
  // SetSecret sets a variable whose value is not for everybody.
  void SetSecret(const std::string& name, const std::string& value, const std::string& why);
  void SetForLauncher(const std::string& name, const std::string& value, const std::string& why);
  // A variable that the ranks of all hosts are given as it stands here, if it does.
  void Export(const std::string& name);

  // Variables that ranks on other hosts must be given, in order.
  std::vector<std::string> Travelling() const;
  // ssh's arguments as one word, which launchers take apart at blanks. Where no answer comes, and
  // behind a link that goes down, it is to end by itself.
  std::string SshWord() const;
  // Whether ssh reaches the hosts, and not what a batch system has for that.
  bool UsesSsh() const {
    return !placement().local && (plan_.own || placement().system == BatchSystem::kNone);
  }
  // More ranks than cores of this machine, where it is known.
  bool CoresAreShared() const;

 private:
  const PlanInput& input_;
  const Networks networks_;
  Plan& plan_;
  std::set<std::string> exports_;
};

void AddOpenMpi4(PlanWriter* writer);
void AddOpenMpi5(PlanWriter* writer);
void AddHydra(PlanWriter* writer);  // of MPICH and of Intel MPI
core::Status AddSrun(PlanWriter* writer);
core::Status AddOwn(PlanWriter* writer);

}  // namespace sirtaki::launch
