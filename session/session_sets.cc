// The part of the session that deals with process sets: who is in which, and how they come and go.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "core/engine/engine.h"
#include "session/session.h"
#include "session/session_impl.h"

namespace sirtaki::session {

using core::RankRanges;
using core::SetNumber;
using core::Status;
using core::StatusCode;

// The world, then the ranks of each host, then those of each local rank: the same numbers on all
// ranks, whichever of these sets matter to one.
std::map<SetNumber, RankRanges> Session::FirstSets() {
  std::vector<RankRanges> by_host(topology_.host_names.size());
  std::vector<RankRanges> by_local_rank;
  for (int rank = 0; rank < topology_.size; ++rank) {
    RankRanges& host =
        by_host[static_cast<std::size_t>(topology_.host_of_rank[static_cast<std::size_t>(rank)])];
    const auto local_rank = static_cast<std::size_t>(host.Count());
    host.Add(rank);
    if (local_rank == by_local_rank.size()) by_local_rank.emplace_back();
    by_local_rank[local_rank].Add(rank);
  }
  std::map<SetNumber, RankRanges> sets;
  sets.emplace(core::kWorldSet, RankRanges::Span(0, topology_.size - 1));
  const auto number = [&sets] { return static_cast<SetNumber>(sets.size()); };
  for (RankRanges& ranks : by_host) {
    if (ranks.Contains(topology_.rank)) local_set_ = number();
    sets.emplace(number(), std::move(ranks));
  }
  for (RankRanges& ranks : by_local_rank) {
    if (ranks.Contains(topology_.rank)) cross_set_ = number();
    sets.emplace(number(), std::move(ranks));
  }
  last_first_set_ = number() - 1;
  return sets;
}

// The lanes make what these sets need, in the order of their numbers, while the engine watches.
Status Session::MakeFirstSets(core::TimePoint deadline) {
  std::vector<core::HandlePtr> made;
  for (const SetNumber set : {local_set_, cross_set_}) {
    auto work = std::make_shared<core::Work>();
    work->handle = impl_->engine->MakeHandle(core::Key::Unnamed(core::kWorldSet, 0));
    made.push_back(work->handle);
    impl_->engine->AddFirstSet(set, *MembersOf(set), std::move(work));
  }
  impl_->engine->StartThread();
  for (const core::HandlePtr& handle : made) {
    Status status = impl_->engine->Wait(*handle, deadline);
    if (status.ok()) continue;
    // Another rank has started, and has failed since: every call says so, as if it had been later.
    if (handle->done() && status.origin().rank != topology_.rank) return Status::Ok();
    if (!handle->done()) {
      status = Status(StatusCode::kTimedOut,
                      "the process sets local and cross were not made within start_timeout (" +
                          core::DurationText(config_.start_timeout) + ")");
    }
    impl_->engine->Abort(status.code(), status.message());
    return status;
  }
  return Status::Ok();
}

std::optional<RankRanges> Session::MembersOf(SetNumber set) const {
  core::MutexLock lock(sets_mutex_);
  const auto found = sets_.find(set);
  if (found == sets_.end()) return std::nullopt;
  return found->second;
}

// Nobody waits for a rank that is not in the set, so it is told at once.
Status Session::CheckMember(const core::Work& work) const {
  const core::Key& key = work.request.key;
  if (key.set == core::kWorldSet) return Status::Ok();
  const std::optional<RankRanges> members = MembersOf(key.set);
  const core::Origin origin{topology_.rank, topology_.host, core::TensorName(key)};
  if (!members) {
    return {StatusCode::kInvalidArgument,
            key.ToString() +
                ": there is no process set of this number; it was removed, or never "
                "added",
            origin};
  }
  if (!members->Contains(topology_.rank)) {
    return {StatusCode::kInvalidArgument,
            key.ToString() + ": this rank, " + std::to_string(topology_.rank) +
                ", is not in that set, which holds rank" + (members->Count() == 1 ? " " : "s ") +
                members->ToString(),
            origin};
  }
  return Status::Ok();
}

Status Session::Join(SetNumber set, core::TimePoint deadline, core::HandlePtr* handle) {
  auto work = std::make_shared<core::Work>();
  work->request.key = core::Key::Join(set);
  work->deadline = deadline;
  Status status = Submit(work, /*will_wait=*/true);
  *handle = work->handle;
  return status;
}

Status Session::AddSet(const RankRanges& members, core::TimePoint deadline, SetNumber* set) {
  core::AddSet change;
  std::string invalid;
  if (members.empty()) {
    invalid = "a process set needs at least one rank";
  } else if (!RankRanges::Span(0, topology_.size - 1).ContainsAll(members)) {
    invalid = "process set of ranks " + members.ToString() + ": the ranks are 0 to " +
              std::to_string(topology_.size - 1);
  } else {
    change.members = members;  // no message carries what are no ranks
  }
  std::int64_t number = -1;
  Status status = ChangeSets(std::move(change), std::move(invalid), deadline, &number);
  if (!status.ok()) return status;
  *set = static_cast<SetNumber>(number);
  core::MutexLock lock(sets_mutex_);
  sets_[*set] = members;
  return status;
}

Status Session::RemoveSet(SetNumber set, core::TimePoint deadline) {
  std::string invalid;
  if (set <= last_first_set_) {
    invalid = "the world and the sets local and cross cannot be removed";
  } else if (!MembersOf(set)) {
    invalid = "there is no process set " + std::to_string(set) + " to be removed";
  }
  Status status = ChangeSets(core::RemoveSet{set}, std::move(invalid), deadline, nullptr);
  if (!status.ok()) return status;
  core::MutexLock lock(sets_mutex_);
  sets_.erase(set);
  return status;
}

// The ranks' changes match by their order: one at a time, so that a refused one has not been counted
// by others.
Status Session::ChangeSets(core::Asked change, std::string invalid, core::TimePoint deadline,
                           std::int64_t* value) {
  const core::GateLock turn(set_change_gate_, "the change of process sets", deadline);
  if (!turn.is_held()) return turn.status();
  auto work = std::make_shared<core::Work>();
  work->request.key =
      core::Key::Named(core::kWorldSet, "#process set change " + std::to_string(set_changes_ + 1));
  work->request.asked = std::move(change);
  work->request.invalid = std::move(invalid);
  work->deadline = deadline;
  Status status = Run(work);
  // One that was refused does not count: perhaps it was because of a rank that has joined, which has
  // counted none.
  if (status.ok()) ++set_changes_;
  if (status.ok() && value != nullptr) *value = work->handle->value();
  return status;
}

}  // namespace sirtaki::session
