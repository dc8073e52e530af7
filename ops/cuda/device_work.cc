#include "ops/cuda/device_work.h"

#include "core/base/check.h"

namespace sirtaki::ops::cuda {

using core::Status;

namespace {

// The caller is in a scope of the device.
Status CheckNotCaptured(const Api& api, StreamHandle stream) {
  int capture = kCaptureNone;
  Status status = Check(api, api.StreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (status.ok() && capture != kCaptureNone) {
    return {
        core::StatusCode::kInvalidArgument,
        "called while its stream is captured in a CUDA graph; collectives cannot be replayed, so "
        "call it outside of the capture"};
  }
  return status;
}

}  // namespace

DeviceWork& AsDeviceWork(core::Work& work) {
  auto* const found = dynamic_cast<DeviceWork*>(&work);
  SIRTAKI_CHECK(found != nullptr, "the work of " + work.request.key.ToString() +
                                      ", whose tensor is on a GPU, is that of the host");
  return *found;
}

Status RefuseCapture(const Device& device, StreamHandle stream) {
  // A default stream has no handle of its own: null is that of the current device.
  const Device::Scope scope(device);
  return scope.status().ok() ? CheckNotCaptured(device.api(), stream) : scope.status();
}

Status NoteReady(EventPool& events, StreamHandle stream, DeviceWork* work) {
  const Device::Scope scope(*work->device);
  if (!scope.status().ok()) return scope.status();
  Status status = CheckNotCaptured(work->device->api(), stream);
  EventPtr ready;
  if (status.ok()) status = events.Mark(stream, &ready);
  if (!status.ok()) return status;
  work->ready = std::move(ready);
  work->producer = stream;
  return status;
}

Status AwaitEvent(const Device& device, const EventPtr& event, StreamHandle stream) {
  if (event == nullptr) return Status::Ok();
  const Device::Scope scope(device);
  if (!scope.status().ok()) return scope.status();
  Status status = CheckNotCaptured(device.api(), stream);
  return status.ok() ? event->Block(stream) : status;
}

Status AwaitDone(const DeviceWork& work, StreamHandle stream) {
  // Null: nothing was launched, as every rank's tensor was absent.
  return AwaitEvent(*work.device, work.done, stream);
}

}  // namespace sirtaki::ops::cuda
