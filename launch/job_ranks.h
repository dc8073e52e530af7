// What sirtakirun knows of the ranks of a run, and what follows from it where none of them has told
// of a failure. Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/types.h"
#include "launch/placement.h"
#include "launch/rank_messages.h"
#include "launch/verdict.h"

namespace sirtaki::launch {

struct Connection;

struct Rank {
  Connection* connection = nullptr;
  HelloMessage hello;
  bool ended = false;  // or was lost
  bool lost = false;
  bool gone = false;     // and so is its host, it seems
  bool in_init = false;  // it went into MPI_Init, or never will
  bool through = false;  // and has come out, or never will
};

// Some have not started in time, or not come out of MPI_Init.
Failure JudgeStart(const std::vector<Rank>& ranks, const HostList& hosts, core::Duration timeout);
Failure JudgeInit(const std::vector<Rank>& ranks, const HostList& hosts, core::Duration timeout);

// The launcher has ended; all that the ranks have said is that they ended well, or nothing.
// `begun`: the programs have.
std::optional<Failure> JudgeLauncher(const std::vector<Rank>& ranks, bool begun,
                                     const std::string& launcher, const EndMessage& end);

// Hosts that seem to be gone, where no rank has told of its end: then it was not one rank alone.
// `own`: this machine's name, which is never one of them.
std::vector<std::string> GoneHosts(const std::vector<Rank>& ranks, const Placement& placement,
                                   const std::string& own);

}  // namespace sirtaki::launch
