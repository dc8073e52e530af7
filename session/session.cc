#include "session/session.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/base/log.h"
#include "core/machine/fork_guard.h"
#include "core/machine/memory_source.h"
#include "core/threads/cooling_sleep.h"
#include "core/threads/stuck_watch.h"
#include "ops/base/keep_forever.h"
#include "session/base/devices.h"
#include "session/session_impl.h"
#include "session/session_observability.h"

namespace sirtaki::session {

using core::Status;
using core::StatusCode;

namespace {

// How long a call waits for its handle after the end of the session.
constexpr auto kGrace = std::chrono::milliseconds(1000);

// How often the end of a session looks whether a call under way is stuck: a look counts for 200 ms at
// most.
constexpr auto kLookInterval = std::chrono::milliseconds(200);

Status Refuse(const core::Work& work, Status why) {
  if (work.handle) work.handle->Refuse(why);
  return why;
}

Status InForkedChild() {
  return {StatusCode::kNotInitialized,
          "called after fork(): a child process has no part in its parent's session and cannot "
          "start its own; start it with exec"};
}

}  // namespace

Session::Impl::~Impl() {
  if (hooks) hooks->Detach();
  if (!engine) return;
  lanes.reset();  // calls nothing of the engine afterwards
  queue.Close({StatusCode::kNotInitialized, "the session has ended"});
  engine.reset();
}

Session::Session() : fork_generation_(core::ForkGeneration()) {}

// A medium, above all MPI, leaves in the process what is the parent's, also after its shutdown.
Status Session::CheckFork() {
  static const int begun_in = core::ForkGeneration();
  return core::ForkGeneration() == begun_in ? Status::Ok() : InForkedChild();
}

// ---- work ----

Status Session::CheckState() const {
  if (core::ForkGeneration() != fork_generation_) {
    return InForkedChild();
  }
  if (state_.load(std::memory_order_acquire) != State::kAlive) {
    return {StatusCode::kNotInitialized, "called after shutdown()"};
  }
  return Status::Ok();
}

Status Session::Check() const {
  Status status = CheckState();
  return status.ok() ? fault() : status;
}

bool Session::is_alive() const {
  return core::ForkGeneration() == fork_generation_ &&
         state_.load(std::memory_order_acquire) == State::kAlive;
}

Status Session::fault() const {
  if (core::ForkGeneration() == fork_generation_) {
    const Call call(*this);
    if (const core::Engine* const engine = call.engine()) return engine->fault();
  }
  core::MutexLock lock(end_mutex_);
  return end_;
}

Status Session::FindGpu(int index, std::shared_ptr<Gpu>* gpu) {
  Status status = CheckState();
  // A world of one rank can do without them.
  const GpuLibraries& libraries = devices_->libraries();
  if (status.ok() && topology_.size > 1 && libraries.kernels == nullptr) {
    status = Status(StatusCode::kUnsupported, libraries.why_no_kernels);
  }
  return status.ok() ? devices_->Find(index, gpu) : status;
}

namespace {

Status WaitsInAPause() {
  return {core::StatusCode::kInvalidArgument,
          "this thread has paused MPI, so this call would wait for ever: call resume_mpi() first"};
}

}  // namespace

Status Session::Submit(const core::WorkPtr& work, bool will_wait) {
  const Call call(*this);
  Status status = CheckState();
  if (status.ok()) status = sets_.CheckMember(*work);
  if (status.ok() && will_wait && PausedByThisThread()) status = WaitsInAPause();
  if (!status.ok()) return Refuse(*work, std::move(status));
  return impl_->engine ? impl_->engine->Submit(work, will_wait) : SubmitSingle(work);
}

Status Session::Wait(core::HandleState& handle, core::TimePoint deadline) {
  if (handle.done()) return handle.status();
  if (core::ForkGeneration() != fork_generation_) return CheckState();
  if (PausedByThisThread()) return WaitsInAPause();
  {
    const Call call(*this);
    if (call.has_impl()) {
      return impl_->engine ? impl_->engine->Wait(handle, deadline) : WaitSingle(handle, deadline);
    }
  }
  // A thread of the session may be about to complete it.
  const core::TimePoint limit = std::min(deadline, core::Clock::now() + kGrace);
  core::CoolingSleep sleep(kGrace / 100);
  while (!handle.done() && core::Clock::now() < limit) sleep.Pause();
  if (handle.done() || limit == deadline) return handle.AfterWait();
  Status why = fault();
  if (why.ok()) {
    why = {StatusCode::kNotInitialized,
           handle.key().ToString() + " has not ended, and the session that it was given to has"};
  }
  handle.Complete(std::move(why));
  return handle.status();
}

void Session::NoteCaller() {
  if (core::ForkGeneration() != fork_generation_) return;
  const Call call(*this);
  if (core::Engine* const engine = call.engine()) engine->NoteCaller();
}

Session::Limits Session::limits() const {
  if (core::ForkGeneration() == fork_generation_) {
    const Call call(*this);
    if (const core::Engine* const engine = call.engine()) return engine->limits().Get();
  }
  return Limits::Of(config_);
}

Status Session::SetLimits(const Limits& limits) {
  if (Status status = CheckState(); !status.ok()) return status;
  std::uint64_t changes = 0;  // that all ranks have seen, those that had joined too
  {
    const Call call(*this);
    if (const auto* const engine = call.engine()) static_cast<void>(engine->limits().Get(&changes));
  }
  auto work = std::make_shared<core::Work>();
  work->request.key =
      core::Key::Named(core::kWorldSet, "#the change of limits " + std::to_string(changes + 1));
  if (limits.AreAllowed()) {
    work->request.asked = limits;
  } else {
    work->request.invalid = "limits must not be negative, and chunk_bytes must be at least 1";
  }
  return Run(work);
}

Status Session::Run(const core::WorkPtr& work) {
  Status status = Submit(work, /*will_wait=*/true);
  if (!status.ok()) return status;
  status = Wait(*work->handle);
  work->handle->Observe();
  return status;
}

std::shared_ptr<void> Session::AllocateShared(std::int64_t bytes) {
  const Call call(*this);
  return (call.engine() ? impl_->medium->backend().memory() : core::PlainMemory()).Allocate(bytes);
}

bool Session::IsShared(const void* memory) const {
  const Call call(*this);
  return call.engine() == nullptr || impl_->medium->backend().memory().Contains(memory);
}

void Session::Abort(const std::string& reason) {
  if (core::ForkGeneration() != fork_generation_) return;
  const Call call(*this);
  if (!call.has_impl()) return;
  if (impl_->engine) return impl_->engine->Abort(StatusCode::kAborted, reason);
  FailAlone({StatusCode::kAborted, reason, {topology_.rank, topology_.host, {}}});
}

// ---- the end ----

Status Session::Shutdown(const std::string& why) {
  if (core::ForkGeneration() != fork_generation_) return Status::Ok();
  if (Inside::Of(*this)) {
    EndFromInside(why);
    return fault();
  }
  const Inside inside(*this);
  core::MutexLock lock(shutdown_mutex_);
  if (state_ != State::kGone) LeaveAndEnd(why);
  return fault();
}

void Session::EndFromInside(const std::string& why) {
  const Call call(*this);
  if (!call.has_impl()) return;
  if (fault().ok()) Abort(why + ", within a call of this thread");
  if (impl_->medium) impl_->medium->NoteFault();
  if (state_ == State::kAlive) EndObservation();
}

void Session::ShutdownAndLog(const std::string& why) {
  if (core::ForkGeneration() == fork_generation_) observation_->SayLastWords();
  const Status status = Shutdown(why);
  if (status.ok()) return;
  core::Log(fault_seen_ ? core::LogLevel::kDebug : core::LogLevel::kWarning,
            "shutdown: " + status.ToString());
}

void Session::NoteSeen(const Status& status) {
  // The fault is the same on all ranks in the end, but a handle may have failed with a cause that
  // an earlier one replaced: whoever has seen that has not seen this.
  const Status known = fault();
  if (!known.ok() && known.code() == status.code() && known.message() == status.message()) {
    fault_seen_ = true;
  }
}

void Session::LeaveAndEnd(const std::string& why) {
  const std::function<void()> print_summary = config_.summary ? BeginSummary() : nullptr;
  state_ = State::kLeaving;
  if (impl_->engine) {
    Status end = impl_->engine->Leave(why);
    impl_->engine->StopThread();
    if (end.ok()) end = impl_->engine->fault();
    const Status ended(StatusCode::kShutDown, "the session has ended: " + why);
    if (end.ok()) {
      impl_->lanes->EndMessages(ended);
    } else {
      impl_->lanes->Abandon(ended);
    }
    core::MutexLock lock(end_mutex_);
    end_ = std::move(end);
  } else {
    impl_->queue.Close({StatusCode::kShutDown, "the session has ended: " + why});
  }
  if (!fault().ok()) {
    observation_->NoteFault();
  } else if (!(impl_->engine && impl_->engine->stuck())) {
    impl_->medium->NoteOrderlyEnd();
  }
  if (print_summary) print_summary();
  EndObservation();
  state_ = State::kGone;
  EndParts();
}

void Session::EndObservation() {
  if (!observation_->End()) ops::KeepForever(observation_);
}

void Session::EndParts() {
  if (impl_ == nullptr) return;
  core::Engine* const engine = impl_->engine.get();
  // Every handle is complete, and a meeting sees that the session is gone: the calls that are under
  // way end by themselves, and the last one rings. One that is stuck in the medium is looked for.
  core::StuckWatch watch(engine != nullptr ? engine->stuck_limit() : core::Duration());
  while (calls_ > 0 && !(engine != nullptr && engine->stuck())) {
    const std::uint64_t ticket = calls_over_.Arm();
    if (calls_ > 0) calls_over_.WaitUntil(ticket, core::Clock::now() + kLookInterval);
    if (engine != nullptr) engine->LookIfStuck(&watch);
  }
  if (engine != nullptr && engine->stuck()) {
    // A thread that is stuck in the medium refers to all of it, and calls under way read it.
    impl_->medium->NoteFault();
    ops::KeepForever(impl_);
    return;
  }
  impl_.reset();
}

Session::~Session() {
  if (core::ForkGeneration() != fork_generation_) {
    // The parts are left: their threads, locks and CUDA are the parent's.
    static_cast<void>(devices_.release());
    static auto& kept = *new std::vector<std::shared_ptr<void>>;
    kept.push_back(std::move(impl_));
    kept.push_back(std::move(observation_));
    return;
  }
  static_cast<void>(Shutdown("the session was dropped"));
}

}  // namespace sirtaki::session
