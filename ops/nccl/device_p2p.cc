#include "ops/nccl/device_p2p.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <thread>
#include <utility>

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

struct Message {
  std::uint64_t number = 0;
  core::WorkPtr work;  // of the tensor on the device
  core::WorkPtr host;  // of the same message in pinned memory, which it keeps
  std::shared_ptr<std::atomic<bool>> there;
  bool begun = false;
  cuda::EventPtr copied;  // null: no copy was launched
  bool is_copied = false;

  void Complete(const Status& status) const { work->handle->Complete(status); }
  void AddRunning(std::vector<core::RunningOperation>* /*list*/) const {
  }  // the host's part shows it
  bool sends() const { return work->request.signature()->kind == core::OpKind::kSend; }
  bool is_there() const { return there->load(std::memory_order_relaxed); }
  bool copies() const { return copied != nullptr && !is_copied; }
  std::int64_t bytes() const {
    const core::Signature& signature = *work->request.signature();
    return signature.ElementCount() * static_cast<std::int64_t>(core::SizeOf(signature.dtype));
  }
};

}  // namespace

struct DeviceP2p::Impl : Lane<Message> {
  explicit Impl(DeviceP2pOptions p2p_options)
      : Lane(p2p_options.on_failure), options(std::move(p2p_options)) {}

  // ---- by anyone ----
  void Ring() SIRTAKI_EXCLUDES(mutex);
  void Stop(const Status& reason, const std::optional<std::string>& tensor)
      SIRTAKI_EXCLUDES(mutex) {
    Lane::Stop(reason, tensor, [] {});
  }

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
  void Complete(const Message& message, const Status& status) SIRTAKI_EXCLUDES(mutex);
  void Fail(const Status& status, const core::Work& work);
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
};

// ---- by anyone ----

void DeviceP2p::Impl::Ring() {
  core::MutexLock lock(mutex);
  rung = true;
  changed.NotifyAll();
}

// ---- its own thread ----

Status DeviceP2p::Impl::Prepare() {
  if (blocks != nullptr) return Status::Ok();
  const std::shared_ptr<cuda::Device>& device = options.device;
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
    status =
        cuda::CopyBytes(options.device->api(), to, from, message.bytes(), kind, stream.handle());
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

void DeviceP2p::Impl::Complete(const Message& message, const Status& status) {
  if (!Finish(message.number)) return;  // it has failed
  if (status.ok()) cuda::AsDeviceWork(*message.work).done = message.copied;
  message.work->handle->Complete(status);
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
  Complete(message, status);
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
      Fail(status, *message->work);
      return status;
    }
    message = over ? under_way.erase(message) : std::next(message);
  }
  return Status::Ok();
}

void DeviceP2p::Impl::Fail(const Status& status, const core::Work& work) {
  if (outward != nullptr && outward->IsGone())
    return Stop({StatusCode::kShutDown, status.message()}, std::nullopt);
  core::Origin origin = status.origin();
  if (origin.rank < 0) origin.rank = options.rank;
  const Status reason(status.code(), P2pText(work) + ": " + status.message(), std::move(origin));
  CallOut([&] { Stop(reason, core::TensorName(work.request.key)); });
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
  if (impl_->EndThread(kP2pGoodBye)) return;
  Abandon({StatusCode::kShutDown, "the session has ended"});
  KeepForever(impl_);
}

DeviceP2p::HostPart DeviceP2p::Start(core::WorkPtr work) {
  auto signature = std::make_shared<core::Signature>(*work->request.signature());
  signature->device = core::DeviceKind::kHost;
  signature->slot = 0;
  Message message;
  message.host = std::make_shared<core::Work>();
  message.host->request.key = work->request.key;
  message.host->request.asked = std::move(signature);
  message.host->peer = work->peer;
  message.host->tag = work->tag;
  message.host->handle = std::make_shared<core::HandleState>(nullptr, work->request.key);
  message.host->handle->Then([of = std::weak_ptr<Impl>(impl_)] {
    if (const auto impl = of.lock()) impl->Ring();
  });
  message.there = std::make_shared<std::atomic<bool>>(false);
  message.work = std::move(work);
  HostPart part{message.host, message.there};
  if (!impl_->Take(message)) return {};
  return part;
}

void DeviceP2p::Abandon(const Status& why) {
  impl_->Stop(why.ok() ? Status(StatusCode::kAborted, "abandoned") : why, std::nullopt);
}

}  // namespace sirtaki::ops::nccl
