// Process sets are groups of ranks that run collectives among themselves.
//
//   const auto even = sirtaki::add_process_set({0, 2});
//   if (even.included()) sirtaki::allreduce(t, sirtaki::AllreduceOptions().process_set(even));
//
// A set that is not ready delays no other set. Sets may overlap. The names of calls, and the
// numbers of those without a name, are the set's own.
#pragma once

#include <torch/arg.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "sirtaki/export.h"

namespace sirtaki {

namespace detail {
struct SetMembership;
}

// A ProcessSet is a cheap, copyable reference to a set; a default-constructed one is all ranks of
// the job. Every options struct of a collective takes one, and so does every helper for models,
// objects and metrics; the call then runs on that set, and only its ranks make it:
//
//   sirtaki::broadcast_parameters(*model, 0);       // to all
//   sirtaki::broadcast_parameters(*model, 2, set);  // to the ranks of the set; 2 is one of them
//
// A call throws InvalidArgument at once, and nothing happens, on a rank outside the set, and for a
// set that was removed or was made before shutdown().
//
// Roots and peers are ranks of the job everywhere, never indices within a set.
class SIRTAKI_API ProcessSet {
 public:
  ProcessSet() = default;
  explicit ProcessSet(std::shared_ptr<const detail::SetMembership> membership)
      : membership_(std::move(membership)) {}

  // Returns the set's number: 0 for all ranks; the same on every rank. Numbers are not used again
  // in a session.
  std::uint32_t id() const noexcept;

  // These functions throw NotInitialized for a default-constructed set before init() and after
  // shutdown(). For a set that was removed they still tell what it was.
  int rank() const;  // index of this process in ranks(), or -1
  int size() const;
  std::vector<int> ranks() const;  // ascending ranks of the job
  bool included() const;           // this process is in it

  // Null: all ranks.
  const std::shared_ptr<const detail::SetMembership>& membership() const { return membership_; }

 private:
  std::shared_ptr<const detail::SetMembership> membership_;
};

struct ProcessSetOptions {
  // If the ranks have not all come in this time, the whole group fails with TimedOut. 0: only the
  // limits of the session hold.
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// Makes a set of these ranks, which may be in any order. Collective over all ranks of the job, also
// those that are not in the set; if there are several calls, all ranks make them in the same order.
// The ranks must agree. Two sets may have the same ranks. Throws InvalidArgument on every rank if
// there are no ranks, or one that is not in the job; Mismatch if the ranks differ.
SIRTAKI_API ProcessSet add_process_set(const std::vector<int>& ranks,
                                       const ProcessSetOptions& options = {});

// Ends a set that add_process_set or InitOptions has made. Collective over all ranks of the job.
// Calls that are still pending in the set fail with InvalidArgument, and so does every later use.
// Throws InvalidArgument for the sets of all ranks, of this host and of this local rank; Mismatch
// if the ranks differ.
SIRTAKI_API void remove_process_set(const ProcessSet& process_set,
                                    const ProcessSetOptions& options = {});

// These functions return the sets that exist from the start. Not collective.
SIRTAKI_API ProcessSet world_process_set();  // all ranks
SIRTAKI_API ProcessSet local_process_set();  // of this host
// The ranks with this local rank, one a host.
SIRTAKI_API ProcessSet cross_process_set();
// Returns the sets that InitOptions::process_set named, in its order. Not collective.
SIRTAKI_API std::vector<ProcessSet> initial_process_sets();

}  // namespace sirtaki
