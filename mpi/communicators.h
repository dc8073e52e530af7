// The communicators of one session: duplicates of the world that the program never sees, one for
// each line of work, so that no message of one can be taken for another's.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <memory>

#include "core/rank_ranges.h"
#include "core/status.h"
#include "core/thread_annotations.h"
#include "core/types.h"
#include "mpi/environment.h"
#include "ops/backend.h"

namespace sirtaki::mpi {

// One communicator and this process's place in it.
struct Line {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = -1;
  int size = 0;
};

// Owned by the session, which destroys it after the transport and the backend. Errors on these
// communicators are returned, never fatal; the program's own keep their handlers.
class Communicators {
 public:
  // Collective over the world. Errors: kTimedOut, kBackend.
  static core::Status Make(Environment& environment, core::TimePoint deadline,
                           std::unique_ptr<Communicators>* communicators);

  // Frees those of the lanes, which MPI may treat as collective: every rank has drained by then.
  // The transport's is kept for the next session, which may find late messages of this one in it
  // (engines drop those of other sessions): freed, its number would be given to another
  // communicator, and MPI would hand it such a message as if it were its own first one. After a
  // fault all are left behind.
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  MPI_Comm transport() const { return transport_; }

  // With MPI_COMM_NULL if there is no such set here. Thread-safe.
  Line For(ops::Channel channel) const SIRTAKI_EXCLUDES(mutex_);

  // Makes both lanes' communicators of a set, on the thread of the large lane, at its place in the
  // agreed order. Blocks until all members are there; on other ranks it does nothing.
  core::Status AddSet(core::SetNumber set, const core::RankRanges& members)
      SIRTAKI_EXCLUDES(mutex_);

 private:
  struct Lanes {
    Line small;
    Line large;
  };

  Communicators(int rank, int size) : rank_(rank), size_(size) {}

  const int rank_;
  const int size_;
  std::uint64_t transport_number_ = 0;  // the same on all ranks
  MPI_Comm transport_ = MPI_COMM_NULL;
  mutable core::Mutex mutex_;
  std::map<core::SetNumber, Lanes> lanes_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::mpi
