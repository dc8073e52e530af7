// Makes MPI calls fail on purpose. A program that uses this has these MPI functions of its own,
// which pass on to MPI (by the PMPI_ names) unless a failure was ordered.
#pragma once

#include <cstdint>

namespace sirtaki::tests {

enum class MpiCall : std::uint8_t {
  kIsend,
  kIrecv,
  kImprobe,
  kImrecv,
  kTest,
  kWait,
  kAllreduce,
  kIallreduce,
  kReduce,
  kIreduce,
  kBcast,
  kIbcast,
  kAllgather,
  kIallgather,
  kAllgatherv,
  kIallgatherv,
  kAlltoall,
  kIalltoall,
  kCommIdup,
  kCommSplitType,
  kCommCreateGroup,
  kCommFree,
  kFinalize,
};
inline constexpr int kMpiCallCount = 23;

enum class MpiFailure : std::uint8_t {
  kInstead,  // the call does nothing; those of other ranks that wait for it never end
  kAfter,    // the call is made, but says that it failed; MPI_Test: once the request is complete
};

// On this rank, the call after `skip` more of its kind returns `code`, and so do all after it.
// Thread-safe.
void FailMpi(MpiCall call, int code, std::int64_t skip = 0,
             MpiFailure failure = MpiFailure::kInstead);

// All calls go through again.
void MendMpi();

// How many calls of this kind were made, failed ones included.
std::int64_t MpiCallsMade(MpiCall call);

}  // namespace sirtaki::tests
