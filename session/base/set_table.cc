#include "session/base/set_table.h"

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "core/protocol/message.h"

namespace sirtaki::session {

using core::RankRanges;
using core::SetNumber;
using core::Status;
using core::StatusCode;

std::map<SetNumber, RankRanges> SetTable::Begin(const core::Topology& topology) {
  rank_ = topology.rank;
  host_ = topology.host;
  std::vector<RankRanges> by_host(topology.host_names.size());
  std::vector<RankRanges> by_local_rank;
  for (int rank = 0; rank < topology.size; ++rank) {
    RankRanges& host =
        by_host[static_cast<std::size_t>(topology.host_of_rank[static_cast<std::size_t>(rank)])];
    const auto local_rank = static_cast<std::size_t>(host.Count());
    host.Add(rank);
    if (local_rank == by_local_rank.size()) by_local_rank.emplace_back();
    by_local_rank[local_rank].Add(rank);
  }
  core::MutexLock lock(mutex_);
  sets_.emplace(core::kWorldSet, RankRanges::Span(0, topology.size - 1));
  const auto add = [&](RankRanges& ranks, SetNumber* mine) SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
    last_first_ = static_cast<SetNumber>(sets_.size());
    if (ranks.Contains(rank_)) *mine = last_first_;
    sets_.emplace(last_first_, std::move(ranks));
  };
  for (RankRanges& ranks : by_host) add(ranks, &local_);
  for (RankRanges& ranks : by_local_rank) add(ranks, &cross_);
  last_alone_ = last_first_;
  return sets_;
}

std::optional<RankRanges> SetTable::MembersOf(SetNumber set) const {
  core::MutexLock lock(mutex_);
  const auto found = sets_.find(set);
  if (found == sets_.end()) return std::nullopt;
  return found->second;
}

Status SetTable::CheckMember(const core::Work& work) const {
  const core::Key& key = work.request.key;
  if (key.set == core::kWorldSet) return Status::Ok();
  const std::optional<RankRanges> members = MembersOf(key.set);
  const core::Origin origin{rank_, host_, core::TensorName(key)};
  if (!members) {
    return {StatusCode::kInvalidArgument,
            key.ToString() +
                ": there is no process set of this number; it was removed, or never "
                "added",
            origin};
  }
  if (!members->Contains(rank_)) {
    return {StatusCode::kInvalidArgument,
            key.ToString() + ": this rank, " + std::to_string(rank_) +
                ", is not in that set, which holds rank" + (members->Count() == 1 ? " " : "s ") +
                members->ToString(),
            origin};
  }
  return Status::Ok();
}

void SetTable::Add(SetNumber set, const RankRanges& members) {
  core::MutexLock lock(mutex_);
  sets_[set] = members;
}

void SetTable::Remove(SetNumber set) {
  core::MutexLock lock(mutex_);
  sets_.erase(set);
}

SetNumber SetTable::NextAlone() {
  core::MutexLock lock(mutex_);
  return ++last_alone_;
}

}  // namespace sirtaki::session
