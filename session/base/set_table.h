// A set table knows which ranks are in which process set, as one rank of the world sees it.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/topology.h"
#include "core/base/types.h"
#include "core/engine/work.h"

namespace sirtaki::session {

// Thread-safe, after Begin.
class SetTable {
 public:
  // Makes the first sets: the world, then the ranks of each host, then those of each local rank. They
  // have the same numbers on all ranks, whichever of them matter to one. Returns them.
  std::map<core::SetNumber, core::RankRanges> Begin(const core::Topology& topology)
      SIRTAKI_EXCLUDES(mutex_);

  core::SetNumber local() const { return local_; }  // the set of this host's ranks
  core::SetNumber cross() const { return cross_; }  // and that of the ranks with this local rank
  bool IsFirst(core::SetNumber set) const { return set <= last_first_; }

  // Nothing if there is no such set (any more).
  std::optional<core::RankRanges> MembersOf(core::SetNumber set) const SIRTAKI_EXCLUDES(mutex_);
  // Why this rank cannot make the call: nobody waits for a rank that is not in the set.
  core::Status CheckMember(const core::Work& work) const SIRTAKI_EXCLUDES(mutex_);

  void Add(core::SetNumber set, const core::RankRanges& members) SIRTAKI_EXCLUDES(mutex_);
  void Remove(core::SetNumber set) SIRTAKI_EXCLUDES(mutex_);
  // The number of the next set of a lone rank, which agrees on it with nobody.
  core::SetNumber NextAlone() SIRTAKI_EXCLUDES(mutex_);

 private:
  int rank_ = 0;
  std::string host_;
  core::SetNumber local_ = core::kWorldSet;
  core::SetNumber cross_ = core::kWorldSet;
  core::SetNumber last_first_ = core::kWorldSet;
  mutable core::Mutex mutex_;
  std::map<core::SetNumber, core::RankRanges> sets_ SIRTAKI_GUARDED_BY(mutex_);
  core::SetNumber last_alone_ SIRTAKI_GUARDED_BY(mutex_) = core::kWorldSet;
};

}  // namespace sirtaki::session
