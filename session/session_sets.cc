// The part of the session that deals with process sets: how they come and go.
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

// The lanes make what these sets need, in the order of their numbers, while the engine watches.
Status Session::MakeFirstSets(core::TimePoint deadline) {
  std::vector<core::HandlePtr> made;
  for (const SetNumber set : {sets_.local(), sets_.cross()}) {
    auto work = std::make_shared<core::Work>();
    work->handle = impl_->engine->MakeHandle(core::Key::Unnamed(core::kWorldSet, 0));
    made.push_back(work->handle);
    impl_->engine->AddFirstSet(set, *sets_.MembersOf(set), std::move(work));
  }
  impl_->engine->StartThread();
  for (const core::HandlePtr& handle : made) {
    Status status = impl_->engine->Wait(*handle, deadline);
    if (status.ok()) continue;
    // Another rank has started, and has failed since: every call says so, as if it had been later.
    const bool is_others =
        status.code() != StatusCode::kPeerLost && status.origin().rank != topology_.rank;
    if (handle->done() && is_others) return Status::Ok();
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
  sets_.Add(*set, members);
  return status;
}

Status Session::RemoveSet(SetNumber set, core::TimePoint deadline) {
  std::string invalid;
  if (sets_.IsFirst(set)) {
    invalid = "the world and the sets local and cross cannot be removed";
  } else if (!sets_.MembersOf(set)) {
    invalid = "there is no process set " + std::to_string(set) + " to be removed";
  }
  Status status = ChangeSets(core::RemoveSet{set}, std::move(invalid), deadline, nullptr);
  if (status.ok()) sets_.Remove(set);
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
