#include "ops/cuda/device_work.h"

namespace sirtaki::ops::cuda {

using core::Status;

Status NoteReady(EventPool& events, StreamHandle stream, DeviceWork* work) {
  const Api& api = work->device->api();
  // A default stream has no handle of its own: null is that of the current device.
  const Device::Scope scope(*work->device);
  if (!scope.status().ok()) return scope.status();
  int capture = kCaptureNone;
  Status status = Check(api, api.StreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (status.ok() && capture != kCaptureNone) {
    return {
        core::StatusCode::kInvalidArgument,
        "called while its stream is captured in a CUDA graph; collectives cannot be replayed, so "
        "call it outside of the capture"};
  }
  EventPtr ready;
  if (status.ok()) status = events.Take(&ready);
  if (status.ok()) status = ready->Record(stream);
  if (!status.ok()) return status;
  work->ready = std::move(ready);
  work->producer = stream;
  return status;
}

Status AwaitDone(const DeviceWork& work, StreamHandle stream) {
  // None: nothing was launched, as every rank's tensor was absent.
  if (work.done == nullptr) return Status::Ok();
  const Device::Scope scope(*work.device);
  return scope.status().ok() ? work.done->Block(stream) : scope.status();
}

}  // namespace sirtaki::ops::cuda
