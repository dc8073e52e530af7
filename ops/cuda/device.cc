#include "ops/cuda/device.h"

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
  if (context_ != nullptr) static_cast<void>(api_.DevicePrimaryCtxRelease(driver_device_));
}

Status Device::Adopt() const {
  Status status = Check(api_, api_.SetDevice(index_), "cudaSetDevice");
  if (!status.ok()) return status;
  // Or a capture in the mode that is the default forbids all threads to look at an event.
  int mode = kCaptureModeThreadLocal;
  return Check(api_, api_.ThreadExchangeStreamCaptureMode(&mode),
               "cudaThreadExchangeStreamCaptureMode");
}

Device::Scope::Scope(const Device& device)
    : api_(device.api_),
      status_(Check(device.api_, device.api_.CtxPushCurrent(device.context_), "cuCtxPushCurrent")) {
}

Device::Scope::~Scope() {
  ContextHandle popped = nullptr;
  if (status_.ok()) static_cast<void>(api_.CtxPopCurrent(&popped));
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

// ---- Stream ----

Status Stream::Make(const std::shared_ptr<Device>& device, std::unique_ptr<Stream>* stream) {
  const Api& api = device->api();
  int least = 0;
  int greatest = 0;
  Status status = Check(api, api.DeviceGetStreamPriorityRange(&least, &greatest),
                        "cudaDeviceGetStreamPriorityRange");
  if (!status.ok()) return status;
  std::unique_ptr<Stream> made(new Stream(device));
  status = Check(api, api.StreamCreateWithPriority(&made->handle_, kStreamNonBlocking, greatest),
                 "cudaStreamCreateWithPriority");
  if (!status.ok()) {
    made->handle_ = nullptr;
    return status;
  }
  *stream = std::move(made);
  return Status::Ok();
}

Stream::~Stream() {
  if (handle_ != nullptr) static_cast<void>(device_->api().StreamDestroy(handle_));
}

}  // namespace sirtaki::ops::cuda
