#include "session/single/single_process_p2p.h"

#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "core/protocol/message.h"
#include "ops/base/keep_forever.h"
#include "ops/cuda/device_work.h"
#include "ops/host/p2p_header.h"

namespace sirtaki::session {

using core::Status;
using core::StatusCode;
namespace cuda = ops::cuda;

namespace {

// The nap between looks at a copy that a thread waits for.
constexpr auto kNapTime = std::chrono::microseconds(50);
// How long the end waits for copies that nobody has waited for.
constexpr auto kGrace = std::chrono::seconds(1);

bool IsOnGpu(const core::Work& work) {
  return work.request.signature()->device == core::DeviceKind::kCuda;
}

cuda::CopyKind KindOf(const core::Work& send, const core::Work& receive) {
  if (!IsOnGpu(send)) return cuda::CopyKind::kHostToDevice;
  return IsOnGpu(receive) ? cuda::CopyKind::kDeviceToDevice : cuda::CopyKind::kDeviceToHost;
}

// Work that the stream is given from now on finds the tensor as its producer has left it.
Status AwaitProducer(core::Work& work, const cuda::Stream& stream) {
  if (!IsOnGpu(work)) return Status::Ok();
  const cuda::EventPtr& ready = cuda::AsDeviceWork(work).ready;
  return ready != nullptr ? ready->Block(stream.handle()) : Status::Ok();
}

Status AwaitEnd(const cuda::Event& end, const std::function<Status()>& check) {
  for (bool reached = false;;) {
    Status status = end.Poll(&reached);
    if (status.ok() && !reached) status = check();
    if (!status.ok() || reached) return status;
    std::this_thread::sleep_for(kNapTime);
  }
}

}  // namespace

SingleProcessP2p::~SingleProcessP2p() {
  const core::TimePoint limit = core::Clock::now() + kGrace;
  core::MutexLock lock(mutex_);
  for (Retire(); !under_way_.empty() && core::Clock::now() < limit; Retire()) {
    std::this_thread::sleep_for(kNapTime);
  }
  if (under_way_.empty()) return;
  ops::KeepForever(std::make_shared<std::deque<Copy>>(std::move(under_way_)));
  for (const auto& [device, copier] : copiers_) copier.stream->LeaveBehind();
}

core::WorkPtr SingleProcessP2p::TakeOtherHalf(const core::WorkPtr& half) {
  const bool is_send = half->request.signature()->kind == core::OpKind::kSend;
  core::MutexLock lock(halves_mutex_);
  Halves& waiting = halves_[half->tag];
  auto& others = is_send ? waiting.receives : waiting.sends;
  if (others.empty()) {
    (is_send ? waiting.sends : waiting.receives).push_back(half);
    return nullptr;
  }
  core::WorkPtr other = std::move(others.front());
  others.pop_front();
  return other;
}

void SingleProcessP2p::Retire() {
  bool reached = true;
  while (!under_way_.empty() && under_way_.front().end->Poll(&reached).ok() && reached) {
    under_way_.pop_front();
  }
}

Status SingleProcessP2p::CopyOnGpu(const core::WorkPtr& send, const core::WorkPtr& receive,
                                   cuda::EventPtr* end) {
  const std::shared_ptr<cuda::Device>& device =
      cuda::AsDeviceWork(IsOnGpu(*receive) ? *receive : *send).device;
  const cuda::Device::Scope scope(*device);
  Status status = scope.status();
  Copier& copier = copiers_[device];
  if (status.ok() && copier.stream == nullptr) status = cuda::Stream::Make(device, &copier.stream);
  if (!status.ok()) return status;
  if (copier.events == nullptr) copier.events = std::make_unique<cuda::EventPool>(device);
  const cuda::StreamHandle stream = copier.stream->handle();
  status = AwaitProducer(*send, *copier.stream);
  if (status.ok()) status = AwaitProducer(*receive, *copier.stream);
  if (status.ok()) {
    status = cuda::CopyBytes(device->api(), receive->output, send->input,
                             ops::HeaderOf(*send).bytes(), KindOf(*send, *receive), stream);
  }
  return status.ok() ? copier.events->Mark(stream, end) : status;
}

Status SingleProcessP2p::Deliver(const core::WorkPtr& send, const core::WorkPtr& receive,
                                 const std::function<Status()>& check) {
  const ops::P2pHeader sent = ops::HeaderOf(*send);
  const ops::P2pHeader expected = ops::HeaderOf(*receive);
  if (sent != expected) {
    return {StatusCode::kMismatch,
            "receive from rank 0, tag " + std::to_string(receive->tag) + ": expected " +
                expected.ToString() + ", rank 0 sent " + sent.ToString(),
            core::Origin{0, {}, core::TensorName(receive->request.key)}};
  }
  if (sent.bytes() == 0) return Status::Ok();
  if (!IsOnGpu(*send) && !IsOnGpu(*receive)) {
    std::memmove(receive->output, send->input, static_cast<std::size_t>(sent.bytes()));
    return Status::Ok();
  }
  const bool between_gpus = IsOnGpu(*send) && IsOnGpu(*receive);
  if (!between_gpus) {
    // CUDA's copy would wait for the tensor's producer within the call, and for ever.
    const cuda::EventPtr& ready = cuda::AsDeviceWork(IsOnGpu(*send) ? *send : *receive).ready;
    if (Status status = ready != nullptr ? AwaitEnd(*ready, check) : Status::Ok(); !status.ok()) {
      return status;
    }
  }
  cuda::EventPtr end;
  {
    core::MutexLock lock(mutex_);
    Retire();
    if (Status status = CopyOnGpu(send, receive, &end); !status.ok()) return status;
    under_way_.push_back({end, send, receive});
  }
  for (const core::WorkPtr& half : {send, receive}) {
    if (IsOnGpu(*half)) cuda::AsDeviceWork(*half).done = end;
  }
  return between_gpus ? Status::Ok() : AwaitEnd(*end, check);
}

}  // namespace sirtaki::session
