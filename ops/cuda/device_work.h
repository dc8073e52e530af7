// Work whose tensors are in a GPU's memory. It is not told when the data are there, as host work
// is, but where: by events. So nobody's host thread waits for the device.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/engine/work.h"
#include "ops/cuda/device.h"

namespace sirtaki::ops::nccl {
class Arena;
struct ArenaRequest;
}  // namespace sirtaki::ops::nccl

namespace sirtaki::ops::cuda {

// All work with a signature of DeviceKind::kCuda is one of these, and so are its parts.
//
//   submitter:  NoteReady on the stream that makes the input; submits
//   lane:       its stream waits for `ready`; launches; sets `done`; completes the handle
//   submitter:  waits for the handle (the launch), then AwaitDone on the stream that uses the
//               result
//
// The lane keeps the tensors until the device is through, whatever the submitter does with them.
struct DeviceWork : core::Work {
  std::shared_ptr<Device> device;
  EventPtr ready;
  StreamHandle producer = nullptr;  // where `ready` is
  EventPtr done;                    // set before the handle completes, and not touched afterwards
  // The lane's, set before allocate_output is called: what that allocates is used there first.
  StreamHandle lane_stream = nullptr;

  // ---- of a part of a bucket that has an arena, on all ranks ----
  std::shared_ptr<nccl::Arena> arena;  // null: it has none
  // Where it is reduced, there. What lies elsewhere the lane brings there, and takes back to an
  // output elsewhere.
  std::byte* place = nullptr;
  std::vector<EventPtr> vacant;  // whoever has read what was there is through with that

  // ---- of the work that makes one, and moves nothing ----
  std::shared_ptr<nccl::ArenaRequest> arena_request;
};

// The work of a tensor on a GPU, as that. Ends the process if it is something else: a bug of
// whoever has submitted it.
DeviceWork& AsDeviceWork(core::Work& work);

// All on the submitter's thread, whatever device it has chosen; `stream` is one of the work's
// device, null its default. Errors: kInvalidArgument while `stream` is being captured in a CUDA
// graph, which would record the call once and replay it without us, and where whatever does not
// belong to it would spoil it; those of CUDA.

core::Status RefuseCapture(const Device& device, StreamHandle stream);

core::Status NoteReady(EventPool& events, StreamHandle stream, DeviceWork* work);

// What is put into `stream` from now on stands behind the event; null: there is nothing to wait
// for.
core::Status AwaitEvent(const Device& device, const EventPtr& event, StreamHandle stream);

// AwaitDone lets the stream wait for the result. Precondition: the handle is done, with an ok
// status.
core::Status AwaitDone(const DeviceWork& work, StreamHandle stream);

}  // namespace sirtaki::ops::cuda
