// The communicators of one session: duplicates of the world that the program never sees, for the
// engine's messages, for collectives and for the program's messages, so that none can be taken for
// another's. Process sets have tags of their own there.
#pragma once

#include <cstdint>
#include <memory>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/types.h"
#include "mpi/api.h"
#include "mpi/environment.h"
#include "ops/base/backend.h"

namespace sirtaki::mpi {

// Owned by the session, which destroys it after the transport and the backend. Errors on these
// communicators are returned, never fatal; the program's own keep their handlers.
class Communicators {
 public:
  // Collective over the world. Errors: kTimedOut, kBackend.
  static core::Status Make(Environment& environment, core::TimePoint deadline,
                           std::unique_ptr<Communicators>* communicators);

  // Frees that of collectives, which MPI may treat as collective: every rank has drained by then.
  // The transport's and that of messages are kept for the next session, which may find late
  // messages of this one in them (engines drop those of other sessions, and messages have other
  // tags then): freed, their numbers would be given to other communicators, and MPI would hand
  // them such a message as if it were their own first one. After a fault all are left behind.
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  Comm transport() const { return kept_.transport; }

  // The communicator for messages between two ranks of the world, with MPI's tags for theirs.
  Comm messages() const { return kept_.messages; }
  int MessageTag(int tag) const { return first_tag_ + tag; }

  Comm collectives() const { return collectives_; }
  // Tags go from 0 to one less than this.
  std::int64_t tags() const { return tags_; }

  // Those that outlive a session, and how many have used them: the same on all ranks.
  struct Kept {
    Comm transport;
    Comm messages;
    std::uint64_t sessions = 0;
  };

  // A communicator of these ranks for the program, which frees it, with the error handler of its
  // world. Collective over them, on any thread; blocks until all of them are there. Also in a world
  // of one rank, which has no communicators of a session.
  static core::Status MakeForProgram(Environment& environment, core::SetNumber set,
                                     const core::RankRanges& members, int* fortran_handle);

 private:
  Communicators(int rank, int size) : rank_(rank), size_(size) {}

  const int rank_;
  const int size_;
  std::uint64_t number_ = 0;  // of what is kept: the same on all ranks
  Kept kept_;
  Comm collectives_;
  std::int64_t tags_ = 0;
  int first_tag_ = 0;  // of messages
};

}  // namespace sirtaki::mpi
