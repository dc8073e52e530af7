// The session of a world of one rank: no engine, no lanes; a call is done when it is submitted, and
// a message when its other half is.
#include <chrono>

#include "core/base/text.h"
#include "core/protocol/message.h"
#include "core/threads/cooling_sleep.h"
#include "ops/host/p2p.h"
#include "session/session.h"
#include "session/session_impl.h"
#include "session/single/single_process.h"

namespace sirtaki::session {

using core::OpKind;
using core::Status;
using core::StatusCode;

namespace {

// The longest sleep of a wait for another thread.
constexpr auto kNapTime = std::chrono::microseconds(200);

}  // namespace

// The queue serves for the names, for the numbers of unnamed calls, and for what waits: whatever
// ends the session completes it.
Status Session::SubmitSingle(const core::WorkPtr& work) {
  if (!work->handle) {
    work->handle = core::HandleHooks::MakeHandle(impl_->hooks, work->request.key);
  }
  work->submitted = core::Clock::now();
  core::TensorQueue& queue = impl_->queue;
  if (Status accepted = queue.Push(work); !accepted.ok()) {
    work->handle->Refuse(accepted);
    return accepted;
  }
  static_cast<void>(queue.Take());
  const core::Request& request = work->request;
  if (request.key == core::Key::Join(request.key.set)) {
    if (queue.EndEpoch(request.key.set) == nullptr) return Status::Ok();  // an abort was faster
    work->handle->SetValue(topology_.rank);
    work->handle->Complete(Status::Ok());
  } else if (work->is_message() && request.invalid.empty()) {
    MatchSingle(work);
  } else if (queue.Resolve(request.key) != nullptr) {
    if (std::holds_alternative<core::AddSet>(request.asked) && request.invalid.empty()) {
      work->handle->SetValue(static_cast<std::int64_t>(sets_.NextAlone()));
    }
    work->handle->Complete(RunInSingleProcess(*work, *devices_));
  }
  return Status::Ok();
}

void Session::MatchSingle(const core::WorkPtr& work) {
  SingleProcessP2p& messages = impl_->messages;
  const core::WorkPtr other = messages.TakeOtherHalf(work);
  if (other == nullptr) return;
  const bool is_send = work->request.signature()->kind == OpKind::kSend;
  const core::TimePoint begin = core::Clock::now();
  const auto check = [&] {
    const core::TimePoint now = core::Clock::now();
    FailOverdue(now);
    const core::Duration limit = config_.stall_limit;
    if (limit > core::Duration::zero() && now - begin >= limit) {
      FailAlone({StatusCode::kTimedOut,
                 ops::P2pText(*work) + ": the GPU has not copied it for " +
                     core::DurationText(now - begin) + ", longer than stall_limit (" +
                     core::DurationText(limit) + ")",
                 {topology_.rank, topology_.host, core::TensorName(work->request.key)}});
    }
    return fault();
  };
  const Status status =
      is_send ? messages.Deliver(work, other, check) : messages.Deliver(other, work, check);
  for (const core::WorkPtr& half : {work, other}) {
    if (impl_->queue.Resolve(half->request.key) == nullptr) continue;
    // The send has ended well, though the receive does not expect what it sent.
    const bool sent =
        half->request.signature()->kind == OpKind::kSend && status.code() == StatusCode::kMismatch;
    half->handle->Complete(sent ? Status::Ok() : status);
  }
}

// Another thread is about to complete it: its submitter, the sender of a message, or the end of the
// session.
Status Session::WaitSingle(core::HandleState& handle, core::TimePoint deadline) {
  core::CoolingSleep sleep(kNapTime);
  for (core::TimePoint now = core::Clock::now(); !handle.done() && now < deadline;
       now = core::Clock::now()) {
    FailOverdue(now);
    if (!handle.done()) sleep.Pause();
  }
  return handle.AfterWait();
}

void Session::FailOverdue(core::TimePoint now) {
  core::Key key;
  core::Duration limit{};
  if (impl_->queue.EarliestDeadline(&key, &limit) > now) return;
  FailAlone({StatusCode::kTimedOut,
             core::TimeOutText(key, limit),
             {topology_.rank, topology_.host, core::TensorName(key)}});
}

void Session::FailAlone(const Status& why) {
  {
    core::MutexLock lock(end_mutex_);
    if (end_.ok()) end_ = why;
  }
  impl_->queue.Close(why);
}

}  // namespace sirtaki::session
