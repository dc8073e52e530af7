#include "ops/cuda/device.h"

#include <chrono>
#include <thread>

namespace sirtaki::ops::cuda {

using core::Status;

// ---- Device ----

Status Device::Open(const Api& api, int index, std::shared_ptr<Device>* device) {
  std::shared_ptr<Device> made(new Device(api, index));
  Status status = Check(api, api.DeviceGet(&made->driver_device_, index), "cuDeviceGet");
  if (status.ok()) {
    status = Check(api, api.DevicePrimaryCtxRetain(&made->context_, made->driver_device_),
                   "cuDevicePrimaryCtxRetain");
  }
  if (!status.ok()) {
    made->context_ = nullptr;
    return {status.code(), "device " + std::to_string(index) + ": " + status.message()};
  }
  *device = std::move(made);
  return Status::Ok();
}

Device::~Device() {
  if (context_ == nullptr) return;
  {
    const Scope scope(*this);
    core::MutexLock lock(mutex_);
    for (StreamHandle stream : free_streams_) static_cast<void>(api_.StreamDestroy(stream));
    for (const auto& [image, module] : modules_) static_cast<void>(api_.ModuleUnload(module));
  }
  static_cast<void>(api_.DevicePrimaryCtxRelease(driver_device_));
}

Status Device::Adopt() const {
  Status status = Check(api_, api_.SetDevice(index_), "cudaSetDevice");
  if (!status.ok()) return status;
  // The mode lets other threads look at an event, which a capture in the default mode forbids.
  int mode = kCaptureModeThreadLocal;
  return Check(api_, api_.ThreadExchangeStreamCaptureMode(&mode),
               "cudaThreadExchangeStreamCaptureMode");
}

Status Device::TakeStream(StreamHandle* stream) {
  {
    core::MutexLock lock(mutex_);
    if (!free_streams_.empty()) {
      *stream = free_streams_.back();
      free_streams_.pop_back();
      return Status::Ok();
    }
  }
  int least = 0;
  int greatest = 0;
  Status status = Check(api_, api_.DeviceGetStreamPriorityRange(&least, &greatest),
                        "cudaDeviceGetStreamPriorityRange");
  if (!status.ok()) return status;
  return Check(api_, api_.StreamCreateWithPriority(stream, kStreamNonBlocking, greatest),
               "cudaStreamCreateWithPriority");
}

void Device::GiveBack(StreamHandle stream) {
  core::MutexLock lock(mutex_);
  free_streams_.push_back(stream);
}

void Device::AddArena(const void* begin, std::int64_t bytes) {
  core::MutexLock lock(mutex_);
  arenas_[static_cast<const std::byte*>(begin)] = bytes;
}

void Device::RemoveArena(const void* begin) {
  core::MutexLock lock(mutex_);
  arenas_.erase(static_cast<const std::byte*>(begin));
}

bool Device::InArena(const void* memory) const {
  const auto* const place = static_cast<const std::byte*>(memory);
  core::MutexLock lock(mutex_);
  auto behind = arenas_.upper_bound(place);
  if (behind == arenas_.begin()) return false;
  --behind;
  return place < behind->first + behind->second;
}

Status Device::LoadModule(const void* image, ModuleHandle* module) {
  core::MutexLock lock(mutex_);
  ModuleHandle& loaded = modules_[image];
  if (loaded == nullptr) {
    Status status = Check(api_, api_.ModuleLoadData(&loaded, image), "cuModuleLoadData");
    if (!status.ok()) {
      modules_.erase(image);
      return status;
    }
  }
  *module = loaded;
  return Status::Ok();
}

Device::Scope::Scope(const Device& device)
    : api_(device.api_),
      status_(Check(device.api_, device.api_.CtxPushCurrent(device.context_), "cuCtxPushCurrent")) {
}

Device::Scope::~Scope() {
  ContextHandle popped = nullptr;
  if (status_.ok()) static_cast<void>(api_.CtxPopCurrent(&popped));
}

Status CopyBytes(const Api& api, void* to, const void* from, std::int64_t bytes, CopyKind kind,
                 StreamHandle stream) {
  if (bytes == 0) return Status::Ok();
  return Check(api, api.MemcpyAsync(to, from, static_cast<std::size_t>(bytes), kind, stream),
               "cudaMemcpyAsync");
}

// ---- Event ----

Status Event::Record(StreamHandle stream) const {
  return Check(api_, api_.EventRecord(handle_, stream), "cudaEventRecord");
}

Status Event::Block(StreamHandle stream) const {
  return Check(api_, api_.StreamWaitEvent(stream, handle_, 0), "cudaStreamWaitEvent");
}

Status Event::Poll(bool* reached) const {
  const Error error = api_.EventQuery(handle_);
  *reached = error == Error::kSuccess;
  if (error == Error::kNotReady) {
    // No failure, but CUDA remembers it as one.
    static_cast<void>(api_.GetLastError());
    return Status::Ok();
  }
  return Check(api_, error, "cudaEventQuery");
}

// ---- EventPool ----

EventPool::EventPool(std::shared_ptr<Device> device) : shared_(std::make_shared<Shared>()) {
  shared_->device = std::move(device);
}

EventPool::~EventPool() {
  std::vector<EventHandle> free;
  {
    core::MutexLock lock(shared_->mutex);
    shared_->closed = true;
    free.swap(shared_->free);
  }
  if (free.empty()) return;
  const Device::Scope scope(*shared_->device);
  for (EventHandle handle : free) {
    static_cast<void>(shared_->device->api().EventDestroy(handle));
  }
}

void EventPool::Shared::Return(EventHandle handle) {
  {
    core::MutexLock lock(mutex);
    if (!closed) {
      free.push_back(handle);
      return;
    }
  }
  // The scope is needed, or CUDA makes a context on whatever device is this thread's.
  const Device::Scope scope(*device);
  static_cast<void>(device->api().EventDestroy(handle));
}

Status EventPool::Take(EventPtr* event) {
  const Api& api = shared_->device->api();
  EventHandle handle = nullptr;
  {
    core::MutexLock lock(shared_->mutex);
    if (!shared_->free.empty()) {
      handle = shared_->free.back();
      shared_->free.pop_back();
    }
  }
  if (handle == nullptr) {
    const Device::Scope scope(*shared_->device);
    if (!scope.status().ok()) return scope.status();
    Status status = Check(api, api.EventCreateWithFlags(&handle, kEventDisableTiming),
                          "cudaEventCreateWithFlags");
    if (!status.ok()) return status;
  }
  *event = EventPtr(new Event(api, handle), [shared = shared_](const Event* taken) {
    shared->Return(taken->handle());
    delete taken;
  });
  return Status::Ok();
}

Status EventPool::Mark(StreamHandle stream, EventPtr* event) {
  EventPtr taken;
  Status status = Take(&taken);
  if (status.ok()) status = taken->Record(stream);
  if (status.ok()) *event = std::move(taken);
  return status;
}

// ---- Stream ----

Status Stream::Make(const std::shared_ptr<Device>& device, std::unique_ptr<Stream>* stream) {
  StreamHandle handle = nullptr;
  Status status = device->TakeStream(&handle);
  if (status.ok()) stream->reset(new Stream(device, handle));
  return status;
}

bool Stream::IsGone() const {
  int capture = 0;
  return device_->api().StreamIsCapturing(handle_, &capture) == Error::kDeinitialized;
}

Stream::~Stream() {
  if (handle_ != nullptr) device_->GiveBack(handle_);
}

bool ComesToItsEnd(const Stream& stream, EventPool& events, core::Duration limit) {
  constexpr auto kPause = std::chrono::milliseconds(1);
  EventPtr end;
  if (!events.Mark(stream.handle(), &end).ok()) return false;
  const core::TimePoint until = core::Clock::now() + limit;
  bool reached = false;
  while (end->Poll(&reached).ok() && !reached && core::Clock::now() < until) {
    std::this_thread::sleep_for(kPause);
  }
  return reached;
}

}  // namespace sirtaki::ops::cuda
