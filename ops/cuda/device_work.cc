#include "ops/cuda/device_work.h"

namespace sirtaki::ops::cuda {

using core::Status;

Status NoteReady(EventPool& events, StreamHandle stream, DeviceWork* work) {
  const Api& api = work->device->api();
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
  if (status.ok()) work->ready = std::move(ready);
  return status;
}

Status AwaitDone(const DeviceWork& work, StreamHandle stream) {
  // None: nothing was launched, as every rank's tensor was absent.
  return work.done == nullptr ? Status::Ok() : work.done->Block(stream);
}

}  // namespace sirtaki::ops::cuda
