// The part of the session that gives the medium to the program: pauses, and communicators of MPI.
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/engine/engine.h"
#include "core/engine/peer_watch.h"
#include "core/machine/fork_guard.h"
#include "core/protocol/mismatch.h"
#include "core/threads/quiet_thread.h"
#include "core/threads/stuck_watch.h"
#include "session/session.h"
#include "session/session_impl.h"

namespace sirtaki::session {

using core::RankRanges;
using core::SetNumber;
using core::Status;
using core::StatusCode;
using core::TimePoint;

namespace {

// How often a rank looks whether a call of MPI, made aside, hangs.
constexpr auto kStuckInterval = std::chrono::milliseconds(100);

// How long a meeting goes on.
class Patience {
 public:
  Patience(const char* what, SetNumber set, TimePoint deadline, const core::Config& config)
      : what_(what), set_(set), warn_at_(After(config.stall_warning)) {
    end_ = std::min(deadline, After(config.stall_limit));
  }

  // kTimedOut when it is over.
  Status Ask() {
    const TimePoint now = core::Clock::now();
    if (now >= end_) return {StatusCode::kTimedOut, Text(now)};
    if (now >= warn_at_) {
      core::Log(core::LogLevel::kWarning, Text(now));
      warn_at_ = TimePoint::max();
    }
    return Status::Ok();
  }

 private:
  TimePoint After(core::Duration time) const {
    return time > core::Duration() ? begin_ + time : TimePoint::max();
  }
  std::string Text(TimePoint now) const {
    return std::string(what_) + " has waited " + core::DurationText(now - begin_) +
           " for the other ranks of process set " + std::to_string(set_);
  }

  const char* const what_;
  const SetNumber set_;
  const TimePoint begin_ = core::Clock::now();
  TimePoint warn_at_;
  TimePoint end_;
};

}  // namespace

// An assembly has a deadline and names who is missing, which MPI's own calls have not. Who has come out
// of it may still be needed by those who have not: so they meet once more beside the engine.
Status Session::Assemble(SetNumber set, const std::string& what, TimePoint deadline) {
  const Call call(*this);
  if (!call.has_impl()) return CheckState();
  std::uint64_t& count = assemblies_[set];
  auto work = std::make_shared<core::Work>();
  work->request.key = core::Key::Named(set, "#" + what + " " + std::to_string(count + 1));
  work->request.asked = core::Assembly{};
  work->deadline = deadline;
  Status status = Run(work);
  // One that was refused does not count: a rank that has joined has counted none.
  if (status.ok()) ++count;
  return status;
}

Status Session::Meet(SetNumber set, const char* what, bool agrees, TimePoint deadline,
                     RankRanges* against) {
  const RankRanges members = MembersOf(set).value_or(RankRanges());
  Patience patience(what, set, deadline, config_);
  Impl& parts = *impl_;  // they live on if the session ends because the engine is stuck
  core::Engine* const engine = parts.engine.get();
  core::PeerWatch peers(parts.medium->PeerCheck());
  const auto go_on = [&] {
    if (state_ == State::kGone) return CheckState();
    if (engine != nullptr) engine->Listen();  // a fault stops the backend
    if (Status lost = peers.Look(core::Clock::now()); !lost.ok()) return lost;
    return patience.Ask();
  };
  std::string all;
  Status status = parts.medium->Meet(set, members, agrees ? 1 : 0, go_on, &all);
  if (!status.ok() && state_ != State::kGone && engine != nullptr) {
    engine->PostFailure(status, "");
    status = engine->fault();  // the first one
  }
  if (against == nullptr) return status;
  against->Clear();
  const std::vector<int> ranks = members.ToVector();
  for (std::size_t i = 0; status.ok() && i < ranks.size(); ++i) {
    if (all[i] == 0) against->Add(ranks[i]);
  }
  return status;
}

Status Session::MakeCommunicator(SetNumber set, TimePoint deadline, int* fortran_handle) {
  const core::GateLock turn(assembly_gate_, "communicator()", deadline);
  if (!turn.is_held()) return turn.status();
  if (is_paused()) return {StatusCode::kInvalidArgument, "MPI is paused: call resume_mpi() first"};
  const RankRanges members = MembersOf(set).value_or(RankRanges());
  Status status = Assemble(set, "communicator for the program", deadline);
  if (!status.ok()) return status;
  const Call call(*this);
  if (!call.has_impl()) return CheckState();
  core::Engine* const engine = impl_->engine.get();
  status = Meet(set, "communicator()", true, deadline);
  if (!status.ok()) return status;
  if (engine == nullptr) return impl_->medium->MakeCommunicator(set, members, fortran_handle);
  status = MakeAside(set, members, fortran_handle);
  if (status.ok()) return status;
  engine->PostFailure(status, "");
  return engine->fault();
}

// MPI makes a communicator in a call that blocks, and nothing but the other members ends it. So that
// the caller comes back though one of them fails in it, another thread makes the call. It is left
// behind when the engine is stuck, in that call or in the one before it, and the engine stays for it
// then. The caller looks for that, since nobody else may.
Status Session::MakeAside(SetNumber set, const RankRanges& members, int* fortran_handle) {
  struct Making {
    core::Mutex mutex;
    core::CondVar changed;
    bool is_over SIRTAKI_GUARDED_BY(mutex) = false;
    int handle SIRTAKI_GUARDED_BY(mutex) = 0;
    Status status SIRTAKI_GUARDED_BY(mutex);
  };
  const auto making = std::make_shared<Making>();
  core::Engine& engine = *impl_->engine;
  std::thread thread =
      core::StartQuietThread([making, &engine, &medium = *impl_->medium, set, members] {
        int handle = 0;
        Status status;
        engine.WhileNobodyDrives([&] { status = medium.MakeCommunicator(set, members, &handle); });
        core::MutexLock lock(making->mutex);
        making->is_over = true;
        making->handle = handle;
        making->status = std::move(status);
        making->changed.NotifyAll();
      });
  core::StuckWatch watch(engine.stuck_limit());
  core::MutexLock lock(making->mutex);
  while (!making->is_over && !engine.stuck()) {
    making->changed.WaitUntil(making->mutex, core::Clock::now() + kStuckInterval);
    engine.LookIfStuck(&watch);
  }
  if (!making->is_over) {
    thread.detach();
    return engine.fault();
  }
  thread.join();
  *fortran_handle = making->handle;
  return making->status;
}

bool Session::PausedByThisThread() const { return paused_by_.load() == std::this_thread::get_id(); }

// All that was submitted before is over after a try or two. What another thread submits meanwhile may
// go on for ever.
Status Session::PauseMedium(TimePoint deadline) {
  constexpr int kTries = 16;
  const core::GateLock turn(assembly_gate_, "pause_mpi()", deadline);
  if (!turn.is_held()) return turn.status();
  if (is_paused()) return {StatusCode::kInvalidArgument, "MPI is paused already"};
  Status status = Assemble(core::kWorldSet, "pause of MPI", deadline);
  if (!status.ok()) return status;
  const Call call(*this);
  if (!call.has_impl()) return CheckState();
  core::Engine* const engine = impl_->engine.get();
  bool pauses = engine == nullptr;
  RankRanges busy;
  for (int i = 0; !pauses && i < kTries; ++i) {
    status = engine->WaitUntilIdle(deadline);
    if (status.ok()) status = Assemble(core::kWorldSet, "pause of MPI, when idle,", deadline);
    if (!status.ok()) return status;
    // Never a wait here: what runs on this rank may need one that has paused.
    const bool paused_here = engine->Pause();
    status = Meet(core::kWorldSet, "pause_mpi()", paused_here, deadline, &busy);
    pauses = status.ok() && busy.empty();
    if (!pauses && paused_here) engine->Resume();
    if (!status.ok()) return status;
  }
  if (!pauses) {
    return {StatusCode::kInvalidArgument,
            "MPI cannot be paused while operations of another thread are under way (on " +
                core::RanksText(busy) + ")"};
  }
  paused_by_ = std::this_thread::get_id();
  return status;
}

Status Session::EnterMedium(core::Gate** gate) const {
  *gate = nullptr;
  if (core::ForkGeneration() != fork_generation_) return Status::Ok();
  std::function<Status()> enter;
  {
    const Call call(*this);
    if (!call.has_impl()) return Status::Ok();
    enter = impl_->medium->EntryOfGate(gate);
  }
  // The wait is no call of the session: the thread that has the gate may be about to end that.
  return enter();
}

// The ranks go on together: whoever is the first takes nobody for lost who is still paused, and who
// answers no ping.
Status Session::ResumeMedium(TimePoint deadline) {
  if (core::ForkGeneration() != fork_generation_) return CheckState();
  const core::GateLock turn(assembly_gate_, "resume_mpi()", deadline);
  if (!turn.is_held()) return turn.status();
  const Call call(*this);
  if (!call.has_impl()) return CheckState();
  if (!is_paused()) return {StatusCode::kInvalidArgument, "MPI is not paused"};
  core::Engine* const engine = impl_->engine.get();
  paused_by_ = std::thread::id();
  if (engine == nullptr) return Status::Ok();
  engine->ExpectPauses(/*elsewhere=*/true);
  engine->Resume();
  const Status status = Assemble(core::kWorldSet, "resumption of MPI", deadline);
  // All ranks have resumed if this has ended well, or was decided against because one has joined.
  if (status.ok() || status.code() == StatusCode::kInvalidArgument) {
    engine->ExpectPauses(/*elsewhere=*/false);
  }
  return status;
}

}  // namespace sirtaki::session
