// These say what sirtakirun knows of the ranks of a run, and what follows from it where none of
// them has told of a failure. Pure.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "core/base/types.h"
#include "launch/base/rank_messages.h"
#include "launch/job/failure_judgement.h"
#include "launch/plan/placement.h"

namespace sirtaki::launch {

struct Connection;

struct Rank {
  Connection* connection = nullptr;
  HelloMessage hello;
  std::string address;  // by which its host reached us
  bool ended = false;   // or was lost
  bool lost = false;
  bool gone = false;     // and so is its host, it seems
  bool stops = false;    // it was told to, and says so
  bool in_init = false;  // it went into MPI_Init, or never will
  bool through = false;  // and has come out, or never will
};

// The host of the plan that a rank is on: by what it calls itself or its address, else by its place
// among the ranks. `own`: this machine's name. Null: it is not known.
const Host* HostOf(const std::vector<Rank>& ranks, std::size_t rank, const Placement& placement,
                   const std::string& own);

// Some have not started in time, or not come out of MPI_Init.
Failure JudgeStart(const std::vector<Rank>& ranks, const HostList& hosts, core::Duration timeout);
Failure JudgeInit(const std::vector<Rank>& ranks, const HostList& hosts, core::Duration timeout);

// The launcher has ended; all that the ranks have said is that they ended well, or nothing.
// `begun`: the programs have.
std::optional<Failure> JudgeLauncher(const std::vector<Rank>& ranks, bool begun,
                                     const std::string& launcher, const EndMessage& end);

// Something else than sirtakirun has killed it.
Failure JudgeKilledLauncher(const std::string& launcher, const EndMessage& end);

// Hosts that seem to be gone, where no rank has told of its end: then it was not one rank alone.
// `own`: this machine's name, which is never one of them.
std::vector<std::string> GoneHosts(const std::vector<Rank>& ranks, const Placement& placement,
                                   const std::string& own);

}  // namespace sirtaki::launch
