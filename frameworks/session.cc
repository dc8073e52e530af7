#include "frameworks/session.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/fork_guard.h"
#include "core/log.h"
#include "core/memory_source.h"
#include "core/tree.h"
#include "frameworks/inproc_world.h"
#include "frameworks/session_parts.h"
#include "frameworks/start.h"
#include "ops/keep_forever.h"

namespace sirtaki::frameworks {

using core::Status;
using core::StatusCode;

namespace {

// How long the end of a failed session waits for operations to return before it leaves them behind.
constexpr auto kGrace = std::chrono::milliseconds(200);

// However short peers' time is: a machine that is overloaded is not stuck.
constexpr auto kStuckAtLeast = std::chrono::seconds(10);

std::int64_t UnixMicroseconds() {
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(since).count();
}

Status Refuse(const core::Work& work, Status why) {
  if (work.handle) {
    work.handle->Disown();
    work.handle->Complete(why);
  }
  return why;
}

Status InForkedChild() {
  return {StatusCode::kNotInitialized,
          "called after fork(): a child process has no part in its parent's session and cannot "
          "start its own; start it with exec"};
}

// The ranks of this host decide together: all spin or none.
int CoresHere(const std::vector<Greeting>& greetings, const Topology& topology) {
  std::vector<core::CpuShare> shares;
  for (std::size_t rank = 0; rank < greetings.size(); ++rank) {
    const auto here = static_cast<std::size_t>(topology.rank);
    if (topology.host_of_rank[rank] == topology.host_of_rank[here]) {
      shares.push_back(greetings[rank].cpus);
    }
  }
  return core::SharedCores(shares);
}

}  // namespace

Session::Parts::~Parts() {
  if (hooks) hooks->Detach();
  if (!engine) return;
  engine->StopThread();
  if (!engine->fault().ok()) {
    const core::TimePoint limit = core::Clock::now() + kGrace;
    while (!lanes->Idle() && core::Clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (!lanes->Idle()) {
      // A thread is stuck in the medium and refers to it: reachable for ever, ended never.
      static auto& kept = *new std::vector<std::unique_ptr<Medium>>;
      static core::Mutex& mutex = *new core::Mutex;
      core::MutexLock lock(mutex);
      kept.push_back(std::move(medium));
    }
  }
  lanes.reset();  // calls nothing of the engine afterwards
  queue.Close({StatusCode::kNotInitialized, "the session has ended"});
  engine.reset();
}

// ---- the start ----

Session::Session() : fork_generation_(core::ForkGeneration()) {}

// What a medium leaves in the process (MPI above all) is the parent's, also after its shutdown.
Status Session::CheckFork() {
  static const int begun_in = core::ForkGeneration();
  return core::ForkGeneration() == begun_in ? Status::Ok() : InForkedChild();
}

Status Session::CreateInproc(std::shared_ptr<InprocWorld> world, int rank,
                             const StartOptions& options, std::shared_ptr<Session>* session) {
  return Create(world->Join(rank), options, session);
}

Status Session::Create(std::unique_ptr<Medium> medium, const StartOptions& options,
                       std::shared_ptr<Session>* session) {
  std::shared_ptr<Session> made(new Session());
  // Before the engine's thread is there: the medium may allow one call at a time.
  Status status = medium->BeforeEnd([weak = std::weak_ptr<Session>(made)] {
    const auto alive = weak.lock();
    if (alive) static_cast<void>(alive->Shutdown("the program has finalized MPI"));
  });
  const core::TimePoint deadline = core::Clock::now() + options.config.start_timeout;
  if (status.ok()) status = made->Start(std::move(medium), options, deadline);
  if (!status.ok()) {
    made->state_ = State::kGone;  // there is nothing to leave
    return status;
  }
  *session = std::move(made);
  return Status::Ok();
}

Status Session::Start(std::unique_ptr<Medium> medium, const StartOptions& options,
                      core::TimePoint deadline) {
  topology_ = medium->topology();
  const std::string mine = Serialize(Greet(options.parsed, options.config, medium->serialized()));
  std::vector<std::string> told;
  if (Status status = medium->Exchange(mine, deadline, &told); !status.ok()) return status;

  std::vector<Greeting> greetings(told.size());
  std::vector<Status> statuses;
  std::vector<core::Config> configs;
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    Status read = Deserialize(told[rank], &greetings[rank]);
    statuses.push_back(read.ok() ? greetings[rank].status : std::move(read));
    configs.push_back(greetings[rank].config);
  }
  if (Status status = FirstFailure(statuses); !status.ok()) return status;
  config_ = options.config;
  if (Status status = core::AgreeConfigs(configs, &config_); !status.ok()) return status;

  {
    core::MutexLock lock(limits_mutex_);
    limits_ = {config_.fusion_bytes,
               config_.small_bytes,
               config_.chunk_bytes,
               config_.bucket_bytes,
               config_.first_bucket_bytes,
               std::chrono::duration_cast<std::chrono::microseconds>(config_.fusion_delay).count()};
  }
  const core::RankRanges serialized = SerializedRanks(greetings);
  const int cores = CoresHere(greetings, topology_);
  cores_per_rank_ = std::max(1, cores / topology_.local_size);
  const bool spin = config_.wait == core::WaitMode::kAuto ? topology_.local_size <= cores
                                                          : config_.wait == core::WaitMode::kSpin;
  if (topology_.size > 1) {
    const Status connected = medium->Connect({config_, !serialized.empty(), spin}, deadline);
    Status met = medium->Exchange(SerializeStatus(connected), deadline, &told);
    if (!connected.ok()) return connected;
    if (met.ok()) met = FirstFailure(told);
    if (!met.ok()) return met;
  }

  std::ostringstream text;
  text << "rank " << topology_.rank << " of " << topology_.size << " on " << topology_.host
       << " (local rank " << topology_.local_rank << " of " << topology_.local_size
       << ", cross rank " << topology_.cross_rank << " of " << topology_.cross_size << "); "
       << medium->description();
  if (!serialized.empty() && !medium->serialized()) {
    text << "; serialized because rank " << serialized.ToString() << " is: both host lanes are "
         << "non-blocking";
  }
  text << "; " << cores << " cores for the ranks of this host, waits " << (spin ? "spin" : "yield")
       << "; options: " << core::DescribeConfig(config_);
  description_ = text.str();
  SIRTAKI_LOG(kInfo, description_);
  Build(std::move(medium), options, greetings.front().token, spin, !serialized.empty());
  return topology_.size == 1 ? Status::Ok() : MakeFirstSets(deadline);
}

void Session::Build(std::unique_ptr<Medium> medium, const StartOptions& options,
                    std::uint64_t token, bool spin, bool serialized) {
  parts_ = std::make_unique<Parts>();
  Parts& parts = *parts_;
  parts.medium = std::move(medium);
  std::map<core::SetNumber, core::RankRanges> sets = FirstSets();
  {
    core::MutexLock lock(sets_mutex_);
    sets_ = sets;
    last_set_alone_ = last_first_set_;
  }
  if (topology_.size == 1) {
    parts.hooks = std::make_shared<core::HandleHooks>(nullptr, &parts.queue);
    return;
  }
  const auto world = core::RankRanges::Span(0, topology_.size - 1);

  core::NegotiatorOptions negotiation;
  negotiation.rank = topology_.rank;
  negotiation.host = topology_.host;
  negotiation.sets = std::move(sets);
  negotiation.id_capacity = static_cast<std::size_t>(config_.id_capacity);
  negotiation.stall_warning = config_.stall_warning;
  negotiation.stall_limit = config_.stall_limit;
  negotiation.ping_interval = config_.ping_interval;
  negotiation.peer_timeout = config_.peer_timeout;
  negotiation.activity = [&parts] { return parts.engine->Activity(); };
  negotiation.unix_us = UnixMicroseconds;
  const core::Tree tree = core::Tree::Build(topology_.host_of_rank, config_.tree_arity);
  parts.negotiator = std::make_unique<core::Negotiator>(std::move(negotiation), tree);

  ops::HostLanesOptions lanes;
  lanes.rank = topology_.rank;
  lanes.limits.fusion_bytes = config_.fusion_bytes;
  lanes.limits.small_bytes = config_.small_bytes;
  lanes.limits.deterministic = config_.deterministic;
  lanes.chunk_bytes = config_.chunk_bytes;
  lanes.sets = {{core::kWorldSet, world}};
  lanes.large_lane_thread = !serialized;
  lanes.flushed = [&parts] { return parts.medium->transport().Flush(); };
  lanes.on_failure = [&parts](const Status& why, const std::string& tensor) {
    parts.engine->PostFailure(why, tensor);
  };
  lanes.on_progress = [&parts] { parts.engine->Ring(); };
  parts.lanes = std::make_unique<ops::HostLanes>(std::move(lanes), parts.medium->backend());

  core::EngineOptions engine;
  engine.session = token;
  engine.rank = topology_.rank;
  engine.host = topology_.host;
  engine.spin = spin;
  engine.on_fault = [&parts](const Status&) { parts.medium->NoteFault(); };
  engine.on_start = options.on_start;
  engine.fusion_delay = config_.fusion_delay;
  engine.stuck_limit = std::max<core::Duration>(3 * config_.peer_timeout, kStuckAtLeast);
  engine.on_limits = [this](const std::vector<std::int64_t>& values) { return NoteLimits(values); };
  engine.on_stall = [](const core::StallWarning& warning) {
    core::Log(core::LogLevel::kWarning, core::StallText(warning));
  };
  parts.engine = std::make_unique<core::Engine>(std::move(engine), parts.medium->transport(),
                                                *parts.negotiator, parts.queue, *parts.lanes);
  parts.engine->StartThread();
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

bool Session::is_alive() const { return CheckState().ok(); }

Status Session::fault() const {
  if (core::ForkGeneration() == fork_generation_) {
    const Call call(*this);
    if (call.has_parts() && parts_->engine) return parts_->engine->fault();
  }
  core::MutexLock lock(end_mutex_);
  return end_;
}

core::HandlePtr Session::MakeHandle(const core::Key& key) {
  const Call call(*this);
  if (call.has_parts() && CheckState().ok()) {
    if (parts_->engine) return parts_->engine->MakeHandle(key);
    return core::HandleHooks::MakeHandle(parts_->hooks, key);
  }
  return std::make_shared<core::HandleState>(nullptr, nullptr);
}

Status Session::Submit(const core::WorkPtr& work, bool will_wait) {
  const Call call(*this);
  Status status = CheckState();
  if (status.ok()) status = CheckMember(*work);
  if (!status.ok()) return Refuse(*work, std::move(status));
  return parts_->engine ? parts_->engine->Submit(work, will_wait) : SubmitAlone(work);
}

Status Session::Wait(core::HandleState& handle, core::TimePoint deadline) {
  if (handle.done()) return handle.status();
  if (core::ForkGeneration() != fork_generation_) return CheckState();
  const Call call(*this);
  if (call.has_parts()) {
    return parts_->engine ? parts_->engine->Wait(handle, deadline) : WaitAlone(handle, deadline);
  }
  // The end of the session is about to complete it.
  while (!handle.done() && core::Clock::now() < deadline) std::this_thread::yield();
  if (handle.done()) return handle.status();
  return {StatusCode::kTimedOut, "still waiting at the deadline of the wait"};
}

Session::Limits Session::limits() const {
  core::MutexLock lock(limits_mutex_);
  return limits_;
}

core::Duration Session::NoteLimits(const std::vector<std::int64_t>& values) {
  core::MutexLock lock(limits_mutex_);
  if (values.size() == 6) {  // else the lanes refuse them
    ++limit_changes_;
    limits_ = {values[0], values[1], values[2], values[3], values[4], values[5]};
  }
  return std::chrono::microseconds(limits_.fusion_delay_us);
}

Status Session::SetLimits(const Limits& limits) {
  auto change = std::make_shared<core::Signature>();
  change->kind = core::OpKind::kSetLimits;
  change->shape = {limits.fusion_bytes, limits.small_bytes,        limits.chunk_bytes,
                   limits.bucket_bytes, limits.first_bucket_bytes, limits.fusion_delay_us};
  auto work = std::make_shared<core::Work>();
  // By the changes that all ranks have seen, those that had joined too.
  work->request.key = core::Key::Named(
      core::kWorldSet, "#change of limits " + std::to_string(limit_changes_.load() + 1));
  work->request.signature = std::move(change);
  Status status = Submit(work, /*will_wait=*/true);
  if (!status.ok()) return status;
  status = Wait(*work->handle);
  work->handle->Observe();
  return status;
}

std::shared_ptr<void> Session::AllocateShared(std::int64_t bytes) {
  const Call call(*this);
  const bool has_backend = call.has_parts() && parts_->engine != nullptr;
  return (has_backend ? parts_->medium->backend().memory() : core::PlainMemory()).Allocate(bytes);
}

bool Session::IsShared(const void* memory) const {
  const Call call(*this);
  const bool has_backend = call.has_parts() && parts_->engine != nullptr;
  return !has_backend || parts_->medium->backend().memory().Contains(memory);
}

void Session::Abort(const std::string& reason) {
  if (core::ForkGeneration() != fork_generation_) return;
  const Call call(*this);
  if (!call.has_parts()) return;
  if (parts_->engine) return parts_->engine->Abort(StatusCode::kAborted, reason);
  FailAlone({StatusCode::kAborted, reason, {topology_.rank, topology_.host, {}}});
}

// ---- the end ----

Status Session::Shutdown(const std::string& why) {
  if (core::ForkGeneration() != fork_generation_) return Status::Ok();
  core::MutexLock lock(shutdown_mutex_);
  if (state_ != State::kGone) LeaveAndEnd(why);
  return fault();
}

void Session::ShutdownAndLog(const std::string& why) {
  const Status status = Shutdown(why);
  if (status.ok()) return;
  core::Log(fault_seen_ ? core::LogLevel::kDebug : core::LogLevel::kWarning,
            "shutdown: " + status.ToString());
}

void Session::NoteSeen(const Status& status) {
  // The same on all ranks in the end, but a handle may have failed with a cause that an earlier one
  // replaced: whoever has seen that has not seen this.
  const Status known = fault();
  if (!known.ok() && known.code() == status.code() && known.message() == status.message()) {
    fault_seen_ = true;
  }
}

void Session::LeaveAndEnd(const std::string& why) {
  state_ = State::kLeaving;
  if (parts_->engine) {
    Status end = parts_->engine->Leave(why);
    parts_->engine->StopThread();
    // Messages that nobody took do not keep the job from ending; those who wait for them are told.
    if (!parts_->lanes->Running().empty()) {
      parts_->lanes->Abandon({StatusCode::kShutDown, "the session has ended: " + why});
    }
    core::MutexLock lock(end_mutex_);
    end_ = std::move(end);
  } else {
    parts_->queue.Close({StatusCode::kShutDown, "the session has ended: " + why});
  }
  state_ = State::kGone;
  if (parts_->engine && parts_->engine->stuck()) {
    // A thread that is stuck in the medium refers to all of it.
    parts_->medium->NoteFault();
    ops::KeepForever(std::shared_ptr<Parts>(std::move(parts_)));
    return;
  }
  // Every handle is complete, so the calls that are under way end by themselves.
  while (calls_.load(std::memory_order_seq_cst) > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  parts_.reset();
}

Session::~Session() {
  if (core::ForkGeneration() != fork_generation_) {
    static_cast<void>(parts_.release());  // its threads and locks are the parent's
    return;
  }
  static_cast<void>(Shutdown("the session was dropped"));
}

}  // namespace sirtaki::frameworks
