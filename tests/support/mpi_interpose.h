// Makes MPI calls fail on purpose. A program that uses this has these MPI functions of its own,
// which pass on to MPI (by the PMPI_ names) unless a failure was ordered.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "core/threads/gate.h"

namespace sirtaki::tests {

enum class MpiCall : std::uint8_t {
  kIsend,
  kIrecv,
  kImprobe,
  kImrecv,
  kTest,
  kIallgather,
  kIallgatherv,
  kCommIdup,
  kCommCreateGroup,
  kCommFree,
  kFinalize,
  kOther,  // those below, which are only counted
};
inline constexpr int kMpiCallCount = 12;

enum class MpiFailure : std::uint8_t {
  kInstead,  // the call does nothing; those of other ranks that wait for it never end
  kAfter,    // the call is made, but says that it failed; MPI_Test: once the request is complete
};

// On this rank, the call after `skip` more of its kind returns `code`, and so do all after it.
// Thread-safe.
void FailMpi(MpiCall call, int code, std::int64_t skip = 0,
             MpiFailure failure = MpiFailure::kInstead);

// On this rank, the next send of at least `bytes` bytes arrives with one of them changed.
void DamageMpi(int bytes);

// Called on all ranks: `rank` does not take part in the next MPI_Comm_create_group, which fails there
// once all others make theirs. They stay in it until `rank` calls MakeMissedGroup().
void MissGroupOn(int rank);
void MakeMissedGroup();

// MPI says that this rank is on a host of this name; "": what it says itself.
void PretendHost(const std::string& name);

// MPI says that it has, or has not, a component ob1 for its messages.
void PretendOb1(bool is_there);

// All calls go through again.
void MendMpi();

// How often a thread came into MPI while another one was there, as far as these functions know. Not
// counted is MPI_Finalize, which calls the program back.
std::int64_t MpiCallsBesideOthers();

// How many calls were made by a thread that did not hold the gate, as long as one is given. Not counted is
// MPI_Finalize.
void WatchGate(const core::Gate* gate);
std::int64_t MpiCallsOutsideGate();

// Each call takes this much longer, so that another one meets it.
void SlowMpi(std::chrono::microseconds by);

// The next call sleeps this long before it is made.
void SlowNextMpi(std::chrono::microseconds by);

// How many calls of this kind were made, failed ones included.
std::int64_t MpiCallsMade(MpiCall call);

}  // namespace sirtaki::tests
