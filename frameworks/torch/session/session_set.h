// A process set in its session: the ranks that a helper of the library works among.
#pragma once

#include <memory>
#include <vector>

#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/session/set_membership.h"
#include "sirtaki/process_set.h"

namespace sirtaki::detail {

struct SessionSet {
  // All ranks of it; where a helper is handed a session it means them.
  // NOLINTNEXTLINE(google-explicit-constructor)
  SessionSet(const std::shared_ptr<SessionState>& of);
  // Throws as MembersOf, and if the session is gone.
  SessionSet(const std::shared_ptr<SessionState>& of, const ProcessSet& set);

  int size() const { return static_cast<int>(members.size()); }
  int rank() const { return members.rank; }  // of this process, in the job
  int first() const { return members.ranks.First(); }
  std::vector<int> ranks() const { return members.ranks.ToVector(); }

  std::shared_ptr<SessionState> session;
  ProcessSet process_set;
  CallMembers members;
};

// Returns the set in the calling thread's session. Throws NotInitialized if there is no session,
// and as SessionSet's constructor.
SessionSet SetOf(const ProcessSet& process_set);

// Throws InvalidArgument if the root is none of them. It is the same on all ranks.
void CheckRoot(int root_rank, const SessionSet& set);

}  // namespace sirtaki::detail
