// The ranks of a process set in LibTorch's part, and the reference to them that a public ProcessSet is.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/types.h"
#include "frameworks/torch/session/session_state.h"
#include "sirtaki/process_set.h"

namespace sirtaki::detail {

// CallMembers are the ranks that take part in a call.
struct CallMembers {
  core::SetNumber set = core::kWorldSet;
  core::RankRanges ranks;
  int rank = 0;  // of this process, in the job

  std::int64_t size() const { return ranks.Count(); }
  std::int64_t index() const { return ranks.IndexOf(rank); }
};

// A public ProcessSet refers to a membership.
struct SetMembership {
  CallMembers members;
  std::weak_ptr<SessionState> session;
};

// Throws InvalidArgument if the set is gone, of another session, or without this process.
CallMembers MembersOf(const ProcessSet& set, const std::shared_ptr<SessionState>& session);

// The sets that init() was given. Collective over all ranks; throws what AgreeOnList and
// add_process_set throw.
void AddInitialSets(const std::vector<std::vector<int>>& sets, std::chrono::milliseconds timeout,
                    const std::shared_ptr<SessionState>& session);

}  // namespace sirtaki::detail
