#include "ops/nccl/group_launch.h"

#include <algorithm>
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
    status = context.events.Take(context.inputs);
    if (status.ok()) status = (*context.inputs)->Record(context.stream.handle());
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
