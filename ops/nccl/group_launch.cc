#include "ops/nccl/group_launch.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace sirtaki::ops::nccl {
namespace {

using core::OpKind;
using core::Status;
using core::StatusCode;

Status LaunchKind(const LaunchContext& context, const GroupTask& task) {
  switch (task.signature().kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      return LaunchReduce(context, task);
    case OpKind::kReduceScatter:
      return LaunchReduceScatter(context, task);
    case OpKind::kBroadcast:
      return LaunchBroadcast(context, task);
    case OpKind::kAllGatherInto:
      return LaunchAllGatherInto(context, task);
    case OpKind::kMakeArena:
      return LaunchArena(context, task);
    case OpKind::kAllGather:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
      return LaunchExchange(context, task);
    default:
      return {StatusCode::kProtocol,
              std::string(core::OpKindName(task.signature().kind)) + " has no place on a device"};
  }
}

}  // namespace

bool HasFailed(Result result) {
  return result != Result::kSuccess && result != Result::kInProgress;
}

Status LaunchContext::Exchange(const std::vector<OutgoingSlice>& outgoing,
                               const std::vector<IncomingSlice>& incoming) const {
  if (outgoing.empty() && incoming.empty()) return Status::Ok();
  return communicator.RunGroup(
      "ncclSend and ncclRecv",
      [&](CommHandle comm) {
        const Api& calls = communicator.api();
        for (const OutgoingSlice& slice : outgoing) {
          const Result result = calls.Send(slice.memory, static_cast<std::size_t>(slice.bytes),
                                           DataType::kUint8, slice.member, comm, stream.handle());
          if (HasFailed(result)) return result;
        }
        for (const IncomingSlice& slice : incoming) {
          const Result result = calls.Recv(slice.memory, static_cast<std::size_t>(slice.bytes),
                                           DataType::kUint8, slice.member, comm, stream.handle());
          if (HasFailed(result)) return result;
        }
        return Result::kSuccess;
      },
      patience);
}

Status LaunchContext::ExchangeParts(const std::byte* from, std::byte* to,
                                    std::int64_t part_bytes) const {
  std::vector<OutgoingSlice> given;
  std::vector<IncomingSlice> taken;
  for (int m = 0; m < communicator.size(); ++m) {
    given.push_back({m, from + m * part_bytes, part_bytes});
    taken.push_back({m, to + m * part_bytes, part_bytes});
  }
  return Exchange(given, taken);
}

Status LaunchContext::ReserveToAsk(std::size_t bytes, std::byte** pages, std::byte** device) const {
  void* pinned = nullptr;
  Status status = host.Reserve(static_cast<std::int64_t>(bytes), &pinned);
  *pages = static_cast<std::byte*>(pinned);
  return status.ok() ? staging.Reserve(static_cast<std::int64_t>(bytes), device) : status;
}

Status LaunchContext::AskBytes(
    std::span<const std::byte> own, std::span<std::byte> told,
    const std::function<Status(const std::byte* from, std::byte* to)>& call) const {
  std::byte* pages = nullptr;
  std::byte* device = nullptr;
  Status status = ReserveToAsk(own.size() + told.size(), &pages, &device);
  if (!status.ok()) return status;
  std::memcpy(pages, own.data(), own.size());
  const cuda::Api& cuda = stream.device().api();
  std::byte* const answer = device + own.size();
  status = cuda::CopyBytes(cuda, device, pages, static_cast<std::int64_t>(own.size()),
                           cuda::CopyKind::kHostToDevice, stream.handle());
  if (status.ok()) status = call(device, answer);
  if (status.ok()) {
    status =
        cuda::CopyBytes(cuda, pages + own.size(), answer, static_cast<std::int64_t>(told.size()),
                        cuda::CopyKind::kDeviceToHost, stream.handle());
  }
  cuda::EventPtr event;
  if (status.ok()) status = events.Mark(stream.handle(), &event);
  if (status.ok()) status = await(*event);
  if (status.ok()) std::memcpy(told.data(), pages + own.size(), told.size());
  return status;
}

Status AwaitProducers(const cuda::Stream& stream, const GroupTask& task) {
  const cuda::Event* last = nullptr;
  std::vector<cuda::EventPtr> seen;  // which the parts of a bucket have in common
  for (const GroupItem& item : task.items) {
    if (item.work == nullptr) continue;
    const cuda::DeviceWork& work = cuda::AsDeviceWork(*item.work);
    for (const cuda::EventPtr& vacant : work.vacant) {
      if (std::find(seen.begin(), seen.end(), vacant) != seen.end()) continue;
      seen.push_back(vacant);
      if (Status status = vacant->Block(stream.handle()); !status.ok()) return status;
    }
    const cuda::EventPtr& ready = work.ready;
    if (ready == nullptr || ready.get() == last) continue;
    last = ready.get();
    if (Status status = ready->Block(stream.handle()); !status.ok()) return status;
  }
  return Status::Ok();
}

Status LaunchGroup(const LaunchContext& context, const GroupTask& task) {
  Status status = AwaitProducers(context.stream, task);
  if (status.ok() && context.inputs != nullptr) {
    status = context.events.Mark(context.stream.handle(), context.inputs);
  }
  return status.ok() ? LaunchKind(context, task) : status;
}

DataType DataTypeOf(core::DType dtype) {
  switch (dtype) {
    case core::DType::kI8:
      return DataType::kInt8;
    case core::DType::kI32:
      return DataType::kInt32;
    case core::DType::kI64:
      return DataType::kInt64;
    case core::DType::kF16:
      return DataType::kFloat16;
    case core::DType::kBF16:
      return DataType::kBfloat16;
    case core::DType::kF32:
      return DataType::kFloat32;
    case core::DType::kF64:
      return DataType::kFloat64;
    default:
      return DataType::kUint8;
  }
}

}  // namespace sirtaki::ops::nccl
