#include "ops/nccl/device_p2p.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/protocol/message.h"
#include "ops/base/keep_forever.h"
#include "ops/cuda/device_work.h"
#include "ops/groups/lane.h"
#include "ops/nccl/pinned_blocks.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;
using core::StatusCode;

// The pauses between looks at the device begin with this one.
constexpr auto kFirstP2pPause = std::chrono::microseconds(20);
// A copy that has ended is seen so late at most: the host of the other side waits for it.
constexpr auto kLongestP2pPause = std::chrono::microseconds(100);
// How long the end waits for copies that are under way, and the destructor for the thread.
constexpr auto kP2pGrace = std::chrono::seconds(1);
constexpr auto kP2pGoodBye = std::chrono::seconds(5);
// Each pair takes a thread, a stream, and NCCL's memory for a communicator. A pair is for one direction:
// where there would be more pairs, their messages go through the host.
constexpr std::size_t kMostPairs = 32;

struct Message {
  std::uint64_t number = 0;
  core::TimePoint since;
  core::WorkPtr work;  // of the tensor on the device
  core::WorkPtr host;  // of the same message in pinned memory, which it keeps
  std::shared_ptr<std::atomic<bool>> there;
  std::shared_ptr<std::atomic<bool>> is_carried;  // by a pair; null: it never is
  bool begun = false;
  cuda::EventPtr copied;  // null: no copy was launched
  bool is_copied = false;

  void Complete(const Status& status) const { work->handle->Complete(status); }
  void AddRunning(std::vector<core::RunningOperation>* list) const {
    if (is_carried == nullptr || !*is_carried) return;  // the host's part shows it
    list->push_back({core::kWorldSet, P2pText(*work) + ", by NCCL", since, {}});
  }
  bool sends() const { return work->request.signature()->kind == core::OpKind::kSend; }
  bool copies() const { return copied != nullptr && !is_copied; }
  std::int64_t bytes() const { return work->request.signature()->Bytes(); }
};

}  // namespace

struct DeviceP2p::Impl : Lane<Message> {
  class Carrier;

  explicit Impl(DeviceP2pOptions p2p_options)
      : Lane(p2p_options.on_failure), options(std::move(p2p_options)) {}

  // ---- by anyone ----
  void Ring() SIRTAKI_EXCLUDES(mutex);
  void Stop(const Status& reason, const std::optional<std::string>& tensor) SIRTAKI_EXCLUDES(mutex);
  // The thread takes a message that goes through the host.
  void Queue(const Message& message) SIRTAKI_EXCLUDES(mutex);
  bool MayGoDirectly(const Message& message) const SIRTAKI_EXCLUDES(mutex);
  // Null: messages to or from the peer go through the host.
  std::shared_ptr<MessagePair> PairOf(int peer, bool sends) SIRTAKI_EXCLUDES(mutex);
  std::vector<std::shared_ptr<MessagePair>> Pairs() const SIRTAKI_EXCLUDES(mutex);
  // The message is over: by what was launched, or by its failure.
  void Fail(const Status& status, const core::Work& work, bool is_gone) SIRTAKI_EXCLUDES(mutex);
  void Complete(std::uint64_t number, core::Work& work, const Status& status,
                const cuda::EventPtr& done) SIRTAKI_EXCLUDES(mutex);

  // ---- its own thread ----
  void Run() SIRTAKI_EXCLUDES(mutex);
  // False: it is over.
  bool AwaitWork() SIRTAKI_EXCLUDES(mutex);
  Status Prepare();
  Status AdvanceAll(bool* moved);
  // `*moved` if something did; `*over` when nobody needs it any more.
  Status Advance(Message& message, bool* moved, bool* over);
  Status Begin(Message& message);
  Status Bring(Message& message);  // what has arrived, to the device
  Status Copy(Message& message, cuda::Stream& stream, cuda::CopyKind kind);
  void Open(Message& message);
  void LetGo(bool failed);  // of what the device may still use

  const DeviceP2pOptions options;

  // These are used by its own thread alone.
  std::unique_ptr<cuda::Stream> outward;  // to the host
  std::unique_ptr<cuda::Stream> inward;
  std::unique_ptr<cuda::EventPool> events;
  std::unique_ptr<PinnedBlocks> blocks;
  std::list<Message> under_way;  // oldest first
  core::Duration pause = kFirstP2pPause;

  bool rung SIRTAKI_GUARDED_BY(mutex) = false;
  // By peer, and whether it sends.
  std::map<std::pair<int, bool>, std::shared_ptr<MessagePair>> pairs SIRTAKI_GUARDED_BY(mutex);
};

// A large message between its start and the decision which way it goes: then the pair has it, or the
// thread of the copies. P2p calls it under the token.
class DeviceP2p::Impl::Carrier : public P2pCarrier {
 public:
  Carrier(std::weak_ptr<Impl> impl, Message message)
      : impl_(std::move(impl)), message_(std::move(message)) {}

  std::uint16_t Offer() override {
    const auto pair = Pair();
    return pair != nullptr ? pair->Offer() : 0;
  }
  P2pAnswer Answer(std::uint16_t offer) override {
    const auto pair = Pair();
    if (pair == nullptr) return {.kind = P2pAnswer::Kind::kNever};
    *message_.is_carried = true;  // before it is launched
    P2pAnswer answer = pair->Answer(offer, {message_.number, message_.work, message_.bytes()});
    *message_.is_carried = answer.kind == P2pAnswer::Kind::kGo;
    return answer;
  }
  void Take(const P2pAnswer& answer) override {
    *message_.is_carried = answer.kind == P2pAnswer::Kind::kGo;
    if (const auto pair = Pair()) {
      pair->Take(answer, {message_.number, message_.work, message_.bytes()});
    }
  }
  void Bring() override {
    is_brought_ = true;
    if (const auto impl = impl_.lock()) impl->Queue(message_);
  }
  // The host's part has ended: if nobody else has the message, it has failed.
  void EndHostPart() {
    const auto impl = impl_.lock();
    if (impl == nullptr) return;
    if (is_brought_) return impl->Ring();
    if (*message_.is_carried) return;
    impl->Complete(message_.number, *message_.work, message_.host->handle->status(), nullptr);
  }

 private:
  std::shared_ptr<MessagePair> Pair() const {
    const auto impl = impl_.lock();
    return impl != nullptr ? impl->PairOf(message_.work->peer, message_.sends()) : nullptr;
  }

  const std::weak_ptr<Impl> impl_;
  const Message message_;
  std::atomic<bool> is_brought_{false};
};

// ---- by anyone ----

void DeviceP2p::Impl::Ring() {
  core::MutexLock lock(mutex);
  rung = true;
  changed.NotifyAll();
}

void DeviceP2p::Impl::Queue(const Message& message) {
  core::MutexLock lock(mutex);
  if (stopped()) return;
  queue.push_back(message);
  changed.NotifyAll();
}

void DeviceP2p::Impl::Stop(const Status& reason, const std::optional<std::string>& tensor) {
  Lane::Stop(reason, tensor, [&] {
    const std::vector<std::shared_ptr<MessagePair>> all = Pairs();
    for (const auto& pair : all) pair->Stop();
    if (all.empty()) return;
    // A thread of ours, which names a tensor, waits for the abort. Abandon leaves it to the threads of
    // the pairs, which a call of NCCL may keep.
    if (tensor) {
      options.pairs.communicators->AbortAll(options.pairs.device);
    } else {
      options.pairs.communicators->StartAbortIfInCall(options.pairs.device);
    }
  });
}

bool DeviceP2p::Impl::MayGoDirectly(const Message& message) const {
  const core::Work& work = *message.work;
  const std::int64_t bytes = message.bytes();
  const bool sends = message.sends();
  if (options.pairs.communicators == nullptr || work.peer == options.rank || bytes <= 0 ||
      bytes < options.least_direct_bytes ||
      options.pairs.device->InArena(sends ? work.input : work.output)) {
    return false;
  }
  std::shared_ptr<MessagePair> pair;
  {
    core::MutexLock lock(mutex);
    const auto found = pairs.find({work.peer, sends});
    if (found == pairs.end()) return !sends || pairs.size() < kMostPairs;
    pair = found->second;
  }
  // A receiver without a pair stays, to tell the sender.
  return pair != nullptr ? !pair->IsGivenUp() : !sends;
}

std::shared_ptr<MessagePair> DeviceP2p::Impl::PairOf(int peer, bool sends) {
  core::MutexLock lock(mutex);
  if (stopped()) return nullptr;
  const auto found = pairs.find({peer, sends});
  if (found != pairs.end()) return found->second;
  if (pairs.size() == kMostPairs) return nullptr;
  std::shared_ptr<MessagePair>& pair = pairs[{peer, sends}];
  const MessagePair::Callbacks callbacks{
      .on_launched =
          [this](const PairMessage& message, const cuda::EventPtr& done) {
            Complete(message.number, *message.work, Status::Ok(), done);
          },
      .on_failure = [this](const Status& why, const core::Work& work,
                           bool is_gone) { Fail(why, work, is_gone); }};
  pair = std::make_shared<MessagePair>(options.pairs, options.rank, peer, sends, callbacks);
  try {
    pair->StartThread([pair] { pair->Run(); }, /*quiet=*/true);
  } catch (const std::system_error&) {
    pair.reset();  // there is no thread to be had
  }
  return pair;
}

std::vector<std::shared_ptr<MessagePair>> DeviceP2p::Impl::Pairs() const {
  std::vector<std::shared_ptr<MessagePair>> all;
  core::MutexLock lock(mutex);
  for (const auto& [key, pair] : pairs) {
    if (pair != nullptr) all.push_back(pair);
  }
  return all;
}

// `is_gone`: CUDA's own end has come before ours.
void DeviceP2p::Impl::Fail(const Status& status, const core::Work& work, bool is_gone) {
  if (is_gone) return Stop({StatusCode::kShutDown, status.message()}, std::nullopt);
  core::Origin origin = status.origin();
  if (origin.rank < 0) origin.rank = options.rank;
  const Status reason(status.code(), P2pText(work) + ": " + status.message(), std::move(origin));
  Stop(reason, core::TensorName(work.request.key));
}

void DeviceP2p::Impl::Complete(std::uint64_t number, core::Work& work, const Status& status,
                               const cuda::EventPtr& done) {
  if (!Finish(number)) return;  // it has failed
  if (status.ok()) cuda::AsDeviceWork(work).done = done;
  work.handle->Complete(status);
}

// ---- its own thread ----

Status DeviceP2p::Impl::Prepare() {
  if (blocks != nullptr) return Status::Ok();
  const std::shared_ptr<cuda::Device>& device = options.pairs.device;
  Status status = device->Adopt();
  if (status.ok()) status = cuda::Stream::Make(device, &outward);
  if (status.ok()) status = cuda::Stream::Make(device, &inward);
  if (!status.ok()) return status;
  events = std::make_unique<cuda::EventPool>(device);
  blocks = std::make_unique<PinnedBlocks>(device);
  return status;
}

bool DeviceP2p::Impl::AwaitWork() {
  const bool polls = std::any_of(under_way.begin(), under_way.end(),
                                 [](const Message& message) { return message.copies(); });
  core::MutexLock lock(mutex);
  const core::TimePoint until = polls ? core::Clock::now() + pause : core::TimePoint::max();
  while (!rung && queue.empty() && !stopped()) {
    if (quits() && under_way.empty()) return false;
    if (!WaitUntil(until)) break;
  }
  const bool wakes = rung || !queue.empty();
  pause = wakes ? kFirstP2pPause : std::min<core::Duration>(2 * pause, kLongestP2pPause);
  rung = false;
  for (; !queue.empty(); queue.pop_front()) under_way.push_back(std::move(queue.front()));
  return !stopped();
}

Status DeviceP2p::Impl::Copy(Message& message, cuda::Stream& stream, cuda::CopyKind kind) {
  const cuda::EventPtr& ready = cuda::AsDeviceWork(*message.work).ready;
  Status status = ready != nullptr ? ready->Block(stream.handle()) : Status::Ok();
  const bool sends = message.sends();
  void* const to = sends ? message.host->output : message.work->output;
  const void* const from = sends ? message.work->input : message.host->input;
  if (status.ok()) {
    status = cuda::CopyBytes(options.pairs.device->api(), to, from, message.bytes(), kind,
                             stream.handle());
  }
  return status.ok() ? events->Mark(stream.handle(), &message.copied) : status;
}

// The host may read it, or write to it.
void DeviceP2p::Impl::Open(Message& message) {
  message.there->store(true, std::memory_order_release);
  if (options.on_progress) CallOut(options.on_progress);
}

Status DeviceP2p::Impl::Begin(Message& message) {
  message.begun = true;
  if (message.bytes() > 0) {
    Status status = Prepare();
    std::shared_ptr<std::byte> block;
    if (status.ok()) status = blocks->Take(message.bytes(), &block);
    if (!status.ok()) return status;
    message.host->input = message.host->output = block.get();
    message.host->keep_alive = std::move(block);
    if (message.sends()) return Copy(message, *outward, cuda::CopyKind::kDeviceToHost);
  }
  Open(message);
  return Status::Ok();
}

Status DeviceP2p::Impl::Bring(Message& message) {
  if (message.bytes() == 0) return Status::Ok();
  return Copy(message, *inward, cuda::CopyKind::kHostToDevice);
}

Status DeviceP2p::Impl::Advance(Message& message, bool* moved, bool* over) {
  if (!message.begun) {
    *moved = true;
    if (Status status = Begin(message); !status.ok()) return status;
  }
  if (message.copies()) {
    Status status = message.copied->Poll(&message.is_copied);
    if (!status.ok()) return status;
    *moved |= message.is_copied;
    if (message.is_copied && message.sends()) Open(message);
  }
  if (!message.host->handle->done()) return Status::Ok();
  // Whatever becomes of it, the device may be at work on its memory.
  const Status& status = message.host->handle->status();
  if (!message.sends() && status.ok() && message.copied == nullptr) {
    if (Status brought = Bring(message); !brought.ok()) return brought;
    *moved = true;
  }
  Complete(message.number, *message.work, status, message.copied);
  *over = !message.copies();
  return Status::Ok();
}

Status DeviceP2p::Impl::AdvanceAll(bool* moved) {
  for (auto message = under_way.begin(); message != under_way.end();) {
    bool over = false;
    Status status;
    try {
      status = Advance(*message, moved, &over);
    } catch (...) {
      status = core::StatusOfException();
    }
    if (!status.ok()) {
      const bool is_gone = outward != nullptr && outward->IsGone();
      CallOut([&] { Fail(status, *message->work, is_gone); });
      return status;
    }
    message = over ? under_way.erase(message) : std::next(message);
  }
  return Status::Ok();
}

void DeviceP2p::Impl::LetGo(bool failed) {
  // What is copied now ends by itself, unless the device is stuck. What one still does that has
  // failed nobody knows.
  bool copied = false;
  const core::TimePoint limit = core::Clock::now() + kP2pGrace;
  while (!copied && !failed && core::Clock::now() < limit) {
    copied = true;
    for (Message& message : under_way) {
      failed |= message.copies() && !message.copied->Poll(&message.is_copied).ok();
      copied &= !message.copies();
    }
    if (!copied && !failed) std::this_thread::sleep_for(kLongestP2pPause);
  }
  if (!copied) {
    KeepForever(std::make_shared<std::list<Message>>(std::move(under_way)));
    if (outward != nullptr) outward->LeaveBehind();
    if (inward != nullptr) inward->LeaveBehind();
    KeepForever(std::shared_ptr<PinnedBlocks>(std::move(blocks)));
  }
  // What is under way goes on this thread, whose device it is.
  under_way.clear();
  blocks.reset();
  events.reset();
  inward.reset();
  outward.reset();
}

void DeviceP2p::Impl::Run() {
  Status status;
  while (status.ok() && AwaitWork()) {
    bool moved = false;
    status = AdvanceAll(&moved);
    if (moved) pause = kFirstP2pPause;
  }
  LetGo(!status.ok());
}

// ---- DeviceP2p ----

DeviceP2p::DeviceP2p(DeviceP2pOptions options) : impl_(std::make_shared<Impl>(std::move(options))) {
  impl_->StartThread([impl = impl_] { impl->Run(); });
}

DeviceP2p::~DeviceP2p() {
  const std::vector<std::shared_ptr<MessagePair>> pairs = impl_->Pairs();
  for (const auto& pair : pairs) pair->Quit();
  bool ended = impl_->EndThread(kP2pGoodBye);
  for (const auto& pair : pairs) {
    if (pair->EndThread(kP2pGoodBye)) continue;
    KeepForever(pair);
    ended = false;
  }
  if (ended) return;
  Abandon({StatusCode::kShutDown, "the session has ended"});
  KeepForever(impl_);
}

DeviceP2p::HostPart DeviceP2p::Start(core::WorkPtr work, core::TimePoint now) {
  auto signature = std::make_shared<core::Signature>(*work->request.signature());
  signature->device = core::DeviceKind::kHost;
  signature->slot = 0;
  Message message;
  message.since = now;
  message.host = std::make_shared<core::Work>();
  message.host->request.key = work->request.key;
  message.host->request.asked = std::move(signature);
  message.host->peer = work->peer;
  message.host->tag = work->tag;
  message.host->handle = std::make_shared<core::HandleState>(nullptr, work->request.key);
  message.there = std::make_shared<std::atomic<bool>>(false);
  message.work = std::move(work);
  const bool may_go_directly = impl_->MayGoDirectly(message);
  if (may_go_directly) message.is_carried = std::make_shared<std::atomic<bool>>(false);
  HostPart part{message.host, message.there, nullptr};
  if (!impl_->Take(message, /*queues=*/!may_go_directly)) return {};
  const core::HandlePtr handle = message.host->handle;
  if (!may_go_directly) {
    handle->Then([of = std::weak_ptr<Impl>(impl_)] {
      if (const auto impl = of.lock()) impl->Ring();
    });
    return part;
  }
  const auto carrier = std::make_shared<Impl::Carrier>(impl_, std::move(message));
  handle->Then([of = std::weak_ptr<Impl::Carrier>(carrier)] {
    if (const auto one = of.lock()) one->EndHostPart();
  });
  part.carrier = carrier;
  return part;
}

std::vector<core::RunningOperation> DeviceP2p::Running() const { return impl_->Running(); }

void DeviceP2p::Abandon(const Status& why) {
  impl_->Stop(why.ok() ? Status(StatusCode::kAborted, "abandoned") : why, std::nullopt);
}

}  // namespace sirtaki::ops::nccl
