#include "ops/nccl/host_bounce.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "ops/base/keep_forever.h"
#include "ops/groups/reduction_terms.h"
#include "ops/nccl/device_lane_impl.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;
using cuda::CopyKind;

constexpr std::int64_t kAlignment = 64;  // what vector instructions like

std::int64_t Place(std::int64_t bytes) { return core::RoundUp(bytes, kAlignment); }

}  // namespace

std::shared_ptr<GroupTask> MakeHostPart(const GroupTask& group, HostBouncePtr* bounce) {
  auto part = std::make_shared<GroupTask>(group);
  auto made = std::make_shared<HostBounce>();
  for (GroupTask::Call& call : part->calls) call.handle = nullptr;
  for (GroupItem& item : part->items) {
    auto signature = std::make_shared<core::Signature>(*item.signature);
    signature->device = core::DeviceKind::kHost;
    item.signature = signature;
    if (item.work == nullptr) continue;
    auto work = std::make_shared<core::Work>();
    work->request = item.work->request;
    work->request.asked = signature;
    work->deadline = item.work->deadline;
    work->submitted = item.work->submitted;
    made->works.push_back(work);
    item.work = std::move(work);
  }
  if (!made->works.empty()) {
    part->calls.front().handle = made->done;
    part->inputs_there = made->there;
    part->of_device = true;
    *bounce = std::move(made);
  }
  return part;
}

Status DeviceLane::Impl::BounceThroughHost(const GroupTask& group, HostBounce& bounce) {
  const cuda::Api& cuda = stream->device().api();
  std::int64_t bytes = 0;
  for (const GroupItem& item : group.items) bytes += Place(item.signature->Bytes());
  void* memory = nullptr;
  Status status = pinned->Reserve(bytes, &memory);
  if (status.ok()) status = AwaitProducers(*stream, group);
  auto* next = static_cast<std::byte*>(memory);
  for (std::size_t i = 0; i < group.items.size() && status.ok(); ++i) {
    const GroupItem& item = group.items[i];
    bounce.works[i]->input = next;
    bounce.works[i]->output = next;
    if (const void* const input = ReducedInput(item)) {
      status = cuda::CopyBytes(cuda, next, input, item.signature->Bytes(), CopyKind::kDeviceToHost,
                               stream->handle());
    }
    next += Place(item.signature->Bytes());
  }
  if (status.ok()) status = AwaitStream();
  if (!status.ok()) return status;
  bounce.there->store(true, std::memory_order_release);
  status = AwaitTold(*bounce.done);
  if (!status.ok()) {  // the host's lane, or its medium, may still use the pages
    KeepForever(std::shared_ptr<PinnedMemory>(std::move(pinned)));
    return status;
  }
  for (std::size_t i = 0; i < group.items.size() && status.ok(); ++i) {
    status = cuda::CopyBytes(cuda, group.items[i].work->output, bounce.works[i]->output,
                             group.items[i].signature->Bytes(), CopyKind::kHostToDevice,
                             stream->handle());
  }
  // The pages serve the next group.
  return status.ok() ? AwaitStream() : status;
}

}  // namespace sirtaki::ops::nccl
