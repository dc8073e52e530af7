#include "core/engine/engine.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>
#include <variant>

#include "core/protocol/wire.h"

namespace sirtaki::core {

namespace {

// One round receives at most this many messages, so that a flood delays nothing else.
constexpr int kReceivedPerRound = 256;

}  // namespace

Engine::Engine(EngineOptions options, Transport& transport, Negotiator& negotiator,
               TensorQueue& queue, Executor& executor)
    : options_(std::move(options)),
      trace_(options_.observer),
      transport_(transport),
      negotiator_(negotiator),
      queue_(queue),
      executor_(executor),
      hooks_(std::make_shared<HandleHooks>(&transport, &queue)),
      peers_(options_.check_peers),
      limits_(options_.limits),
      driver_(options_, token_, transport, *this) {}

Engine::~Engine() { hooks_->Detach(); }

HandlePtr Engine::MakeHandle(const Key& key) { return HandleHooks::MakeHandle(hooks_, key); }

Status Engine::Submit(const WorkPtr& work, bool will_wait) {
  if (!work->handle) work->handle = MakeHandle(work->request.key);
  work->submitted = Now();
  callers_.Note();
  Status accepted = queue_.Push(work);
  if (!accepted.ok()) {
    work->handle->Refuse(accepted);
  } else if (work->is_message()) {
    urgent_ = true;
    if (!will_wait) driver_.WakeSomebody();
  } else if (!will_wait && !driver_.ComesBackForNewWork()) {
    driver_.WakeSomebody();
  }
  return accepted;
}

void Engine::AddFirstSet(SetNumber set, const RankRanges& members, WorkPtr work) {
  MutexLock lock(token_);
  executor_.AddSet(set, members, std::move(work), Now());
}

// ---- one round ----

// The analysis does not know that the driver's token is this one; so below.
bool Engine::RunOnce(bool waited_for) SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  MutexLock lock(token_);
  return driver_.MakeRound(Now(), waited_for);
}

// Memory may be short, or a callback may throw: then the group fails, and neither the token nor what
// the round had taken out of the queue is lost with it.
bool Engine::Round(TimePoint now, bool waited_for) {
  try {
    return UnguardedRound(now, waited_for);
  } catch (const std::exception& error) {
    PostFailure({StatusCode::kBackend, std::string("the engine failed: ") + error.what()}, {});
    const Status why = fault();
    // The command that told the negotiator of an earlier fault may have been taken and lost.
    if (!negotiator_.faulted()) negotiator_.RaiseFault(why);
    FailInHand(why);
    return false;
  }
}

bool Engine::UnguardedRound(TimePoint now, bool waited_for) {
  const bool only_listens = pauses_.here();
  // Taken before the work and carried out after it: what was submitted before a Leave goes before
  // it.
  const std::vector<Command> commands = commands_.Take();
  bool moved = !only_listens && (waited_for || !commands.empty() || !Holds(now)) && SubmitNew(now);
  CarryOut(commands, now);
  moved |= !commands.empty();
  moved |= ReceiveSome(now);
  CheckDeadlines(now);
  if (now >= peers_.next()) LookAtPeers(now);
  if (Status health = transport_.health(); !health.ok() && !fault_.known()) {
    negotiator_.RaiseFault(health);
  }
  StepNegotiator(now);
  // Before anything is taken: what throws here, as a callback may, must not lose what tells the peers.
  if (negotiator_.faulted()) NoticeFault();
  Negotiator::Ready ready = negotiator_.TakeReady(/*with_batches=*/!only_listens);
  // Before the lanes: the peers may start as early as we do.
  moved |= Send(std::move(ready.outgoing));
  if (negotiator_.faulted()) NoticeFault();  // that taking has found, which the next round tells
  TellStalls(ready.warnings, now);
  moved |= StartBatches(std::move(ready.batches));
  if (!only_listens && !negotiator_.faulted()) moved |= executor_.Step();
  NoticeEnd(now);
  return moved;
}

// Whether new work is left where it is for a while.
bool Engine::Holds(TimePoint now) {
  if (!queue_.HasNew() || urgent_.exchange(false)) return false;
  return hold_.Holds(queue_.NewCount(), std::chrono::microseconds(limits_.Get().fusion_delay_us),
                     now);
}

bool Engine::SubmitNew(TimePoint now) {
  hold_.Release();
  if (!queue_.HasNew()) return false;
  const std::vector<WorkPtr> works = queue_.Take();
  if (works.empty()) return true;  // closed meanwhile
  const Key& last = works.back()->request.key;
  const bool has_step = last.form == Key::Form::kBucket && options_.step;
  last_submission_ = {last, now, has_step ? options_.step() : 0};
  std::int64_t calls = 0;
  TimePoint first_call = now;
  for (const WorkPtr& work : works) {
    if (negotiator_.faulted()) continue;  // the queue is closed and completes it
    if (negotiator_.leaving()) {
      queue_.Resolve(work->request.key);
      work->handle->Complete({StatusCode::kNotInitialized, "submitted after shutdown()"});
      continue;
    }
    const Key& key = work->request.key;
    if (!negotiator_.IsMember(key.set)) {
      queue_.Resolve(key);
      work->handle->Complete(
          {StatusCode::kInvalidArgument, key.ToString() + ": there is no such process set"});
      continue;
    }
    if (work->deadline != TimePoint::max()) Watch(work);
    if (!work->is_message() && calls++ == 0) first_call = work->submitted;
    if (key.is_join()) {
      trace_.Joined(*work);
      negotiator_.Join(key.set, now);
      continue;
    }
    trace_.Submitted(*work);
    if (work->is_message()) {
      // Null if the queue was closed meanwhile, which has completed it.
      if (WorkPtr message = TakeInHand(key)) executor_.StartP2p(std::move(message), now);
      in_hand_.clear();
    } else {
      negotiator_.Submit(work->request, now);
    }
  }
  trace_.BeginCalls(calls, first_call);
  return true;
}

bool Engine::ReceiveSome(TimePoint now) {
  for (int i = 0; i < kReceivedPerRound; ++i) {
    const std::optional<Incoming> incoming = transport_.TryReceive();
    if (!incoming) return i > 0;
    Receive(*incoming, now);
  }
  return true;
}

void Engine::Receive(const Incoming& incoming, TimePoint now) {
  Message message;
  const Status decoded = DecodeFrame(incoming.bytes, &message);
  if (!decoded.ok()) {
    negotiator_.RaiseFault(StatusCode::kProtocol,
                           "rank " + std::to_string(incoming.from) +
                               " sent a message that cannot be read: " + decoded.message(),
                           {});
    return;
  }
  if (message.session != options_.session) return;  // of an earlier init()
  negotiator_.Receive(incoming.from, std::move(message.body), now);
}

// Keeps an eye on a call with a time-out until its handle is done, wherever the work is meanwhile.
void Engine::Watch(const WorkPtr& work) {
  queue_.HandOverDeadline(*work);
  timed_calls_.Add(work->deadline,
                   {work->request.key, work->deadline - work->submitted, work->handle});
}

void Engine::CheckDeadlines(TimePoint now) {
  while (std::optional<TimedCall> late = timed_calls_.TakeLate(now)) CallIsLate(*late, now);
  CheckHeldWork(now);
}

// The group's fault, but first the seat may say for whom the call has waited.
void Engine::CallIsLate(TimedCall call, TimePoint now) {
  if (!call.asked) {
    call.asked = true;
    const Duration time = negotiator_.TimeOut(call.key, call.limit, now);
    if (time > Duration::zero()) timed_calls_.Add(now + time, std::move(call));
    return;
  }
  negotiator_.RaiseFault(StatusCode::kTimedOut, TimeOutText(call.key, call.limit),
                         TensorName(call.key));
}

// Work that is held back behind an earlier use of its name, and so not watched here, ages too.
void Engine::CheckHeldWork(TimePoint now) {
  Key key;
  Duration limit{};
  if (queue_.EarliestDeadline(&key, &limit) > now) return;
  negotiator_.RaiseFault(StatusCode::kTimedOut, TimeOutText(key, limit), TensorName(key));
}

// Once all have left, each may end when it likes.
void Engine::LookAtPeers(TimePoint now) {
  const bool faulted = negotiator_.faulted() || fault_.known();  // one that was posted says why
  if (faulted || negotiator_.all_left() || !Outstanding()) return peers_.Skip(now);
  const Status lost = peers_.Look(now);
  if (!lost.ok()) negotiator_.RaiseFault(lost);
}

void Engine::StepNegotiator(TimePoint now) {
  local_.others_pause = pauses_.anywhere();
  local_.drained = executor_.Idle();
  if (local_.drained && !executor_.NeedsStepping()) {  // messages are stepped in idle lanes
    local_.running.clear();
  } else if (now - looked_at_running_ >= kRunningInterval) {
    looked_at_running_ = now;
    local_.running = executor_.Running();
  }
  negotiator_.Step(local_, now);
}

void Engine::TellStalls(const std::vector<StallWarning>& warnings, TimePoint now) {
  for (const StallWarning& warning : warnings) {
    trace_.Stalled(StallBrief(warning), now);
    if (options_.on_stall) options_.on_stall(warning);
  }
}

bool Engine::Send(std::vector<Outgoing> outgoing) {
  for (Outgoing& message : outgoing) {
    transport_.Send(message.to, EncodeFrame({options_.session, std::move(message.body)}));
  }
  flushed_ = transport_.Flush();
  if (flushed_ && fault_.failed() && !fault_.told()) {
    fault_.NoteTold();
    transport_.Wake();
  }
  return !outgoing.empty();
}

bool Engine::StartBatches(std::vector<DecidedBatch> batches) {
  if (batches.empty()) return false;
  const TimePoint now = Now();  // what has come during the round was called after its beginning
  for (DecidedBatch& batch : batches) {
    // No entry starts after a fault, of which a data thread may know before the negotiator does.
    if (negotiator_.faulted() || queue_.closed()) break;
    const bool makes_sense = StartBatch(std::move(batch), now);
    trace_.EndCalls(std::exchange(calls_ended_, 0), now);
    in_hand_.clear();
    if (!makes_sense) break;
  }
  return true;
}

// Takes the work of a key, of a join with the set's epoch, out of the queue.
WorkPtr Engine::TakeInHand(const Key& key) {
  HandlePtr& handle = in_hand_.emplace_back();
  WorkPtr work = key.is_join() ? queue_.EndEpoch(key.set) : queue_.Resolve(key);
  if (work != nullptr) handle = work->handle;
  return work;
}

void Engine::FailInHand(const Status& why) {
  for (const HandlePtr& handle : in_hand_) {
    if (handle != nullptr) handle->Complete(why);
  }
  in_hand_.clear();
}

bool Engine::StartBatch(DecidedBatch decided, TimePoint now) {
  RunBatch batch{decided.set, decided.number, std::move(decided.members), limits_.Get(), {}};
  batch.items.reserve(decided.entries.size());
  for (Decided& entry : decided.entries) {
    const auto start = [&](auto& what)
                           SIRTAKI_NO_THREAD_SAFETY_ANALYSIS { return Start(what, batch, now); };
    if (!std::visit(start, entry)) return false;
  }
  if (batch.items.empty()) return true;
  if (options_.on_start) options_.on_start(batch);
  executor_.Start(std::move(batch), now);
  return true;
}

// Null: this rank has joined, or the queue was closed meanwhile.
WorkPtr Engine::TakeAgreed(const Key& key, const RunBatch& batch, TimePoint now) {
  WorkPtr work = TakeInHand(key);
  if (work == nullptr) return work;
  trace_.Agreed(*work, batch.number, now);
  ++calls_ended_;
  return work;
}

// A data thread's failure or an abort has closed the queue meanwhile, or the ranks disagree.
bool Engine::Misses(const Key& key, bool has_submitted) {
  const bool closed = queue_.closed();
  if (!closed) {
    negotiator_.RaiseFault(StatusCode::kProtocol,
                           "the ranks agreed to run " + key.ToString() +
                               (has_submitted ? " without this rank, which has submitted it"
                                              : ", which this rank has not submitted"),
                           TensorName(key));
  }
  FailInHand(closed ? fault() : InWords(negotiator_.cause().ToStatus()));
  return false;
}

bool Engine::Start(DecidedRun& run, RunBatch& batch, TimePoint now) {
  WorkPtr work = TakeAgreed(run.key, batch, now);
  const bool is_here = work != nullptr;
  if (is_here == run.silent.Contains(options_.rank)) return Misses(run.key, is_here);
  if (work && !run.silent.empty()) work->handle->SetJoined(run.silent.First());
  const std::size_t parts = std::max<std::size_t>(run.signature->parts.size(), 1);
  if (run.absent.size() != parts) run.absent.clear();
  if (work && !run.absent.empty()) work->handle->SetAbsentParts(run.absent);
  RunItem& item = batch.items.emplace_back();
  static_cast<DecidedRun&>(item) = std::move(run);
  item.work = std::move(work);
  return true;
}

bool Engine::Start(const DecidedFail& fail, RunBatch& batch, TimePoint now) {
  const WorkPtr work = TakeInHand(fail.key);
  if (work == nullptr) return true;
  const Status why = InWords(fail.why);
  trace_.Refused(*work, why, batch.number, now);
  ++calls_ended_;
  work->handle->Complete(why);
  return true;
}

bool Engine::Start(const DecidedJoin& join, RunBatch& batch, TimePoint now) {
  if (join.set == kWorldSet) ExpectPauses(/*elsewhere=*/false);  // all have resumed to come here
  const WorkPtr work = TakeAgreed(Key::Join(join.set), batch, now);
  if (work == nullptr) return true;
  work->handle->SetValue(join.last);
  work->handle->Complete(Status::Ok());
  return true;
}

bool Engine::Start(const AddSetEntry& added, RunBatch& batch, TimePoint now) {
  executor_.AddSet(added.set, added.members, TakeAgreed(added.key, batch, now), now);
  return true;
}

bool Engine::Start(const RemoveSetEntry& removed, RunBatch& batch, TimePoint now) {
  static_cast<void>(queue_.EndEpoch(removed.set));
  executor_.RemoveSet(removed.set, TakeAgreed(removed.key, batch, now), now);
  return true;
}

bool Engine::Start(const LimitsEntry& change, RunBatch& batch, TimePoint now) {
  const WorkPtr work = TakeAgreed(change.key, batch, now);
  limits_.Change(change.limits);
  if (work != nullptr) work->handle->Complete(Status::Ok());
  return true;
}

bool Engine::Start(const AssemblyEntry& assembly, RunBatch& batch, TimePoint now) {
  const WorkPtr work = TakeAgreed(assembly.key, batch, now);
  if (work == nullptr) return Misses(assembly.key);  // nobody has joined who assembles
  work->handle->Complete(Status::Ok());
  return true;
}

}  // namespace sirtaki::core
