// What only moves: broadcast and the all-gather of equal shapes, all tensors of a group in one
// group of NCCL's; and the kinds whose rows only the ranks know, who have told them through the host.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/groups/row_exchange.h"
#include "ops/nccl/group_launch.h"

namespace sirtaki::ops::nccl {
namespace {

using core::DType;
using core::OpKind;
using core::Status;
using cuda::CopySegment;

// Each tensor of a group has memory of its own, as what a group of NCCL's starts runs together.
std::int64_t ScratchOf(const GroupItem& item) {
  constexpr std::int64_t kMoveAlignment = 16;
  return core::RoundUp(item.signature->Bytes(), kMoveAlignment);
}

// Calls call(item, scratch) for each item that has bytes, as one group. `scratch`: the bytes that
// the items before it have. It gives the first bad result.
template <typename Function>
Status ForEachInGroup(const LaunchContext& context, const GroupTask& task, const char* function,
                      Function call) {
  return context.communicator.RunGroup(
      function,
      [&](CommHandle comm) {
        std::int64_t scratch = 0;
        for (const GroupItem& item : task.items) {
          if (item.signature->Bytes() == 0) continue;
          const Result result = call(comm, item, scratch);
          if (HasFailed(result)) return result;
          scratch += ScratchOf(item);
        }
        return Result::kSuccess;
      },
      context.patience);
}

std::int64_t LargestScratch(const GroupTask& task) {
  std::int64_t largest = 0;
  for (const GroupItem& item : task.items) largest = std::max(largest, ScratchOf(item));
  return largest;
}

std::int64_t SumOfScratch(const GroupTask& task) {
  std::int64_t sum = 0;
  for (const GroupItem& item : task.items) sum += ScratchOf(item);
  return sum;
}

// All members give as much as each other: NCCL has that in one call, which goes from GPU to GPU and
// crosses between two hosts once.
Status GatherEven(const LaunchContext& context, const std::vector<CopySegment>& gathered) {
  return context.communicator.RunGroup(
      "ncclAllGather",
      [&](CommHandle comm) {
        for (const CopySegment& each : gathered) {
          const Result result = context.communicator.api().AllGather(
              each.from, each.to, static_cast<std::size_t>(each.count), DataType::kUint8, comm,
              context.stream.handle());
          if (HasFailed(result)) return result;
        }
        return Result::kSuccess;
      },
      context.patience);
}

}  // namespace

Status LaunchBroadcast(const LaunchContext& context, const GroupTask& task) {
  const std::int64_t root = task.members->IndexOf(task.signature().root);
  // A rank that has joined drops what comes.
  std::byte* scratch = nullptr;
  if (task.joined()) {
    Status status = context.staging.Reserve(SumOfScratch(task), &scratch);
    if (!status.ok()) return status;
  }
  return ForEachInGroup(context, task, "ncclBroadcast",
                        [&](CommHandle comm, const GroupItem& item, std::int64_t before) {
                          void* to = scratch == nullptr ? nullptr : scratch + before;
                          const void* from = to;
                          if (item.work != nullptr) {
                            from = item.work->input;
                            to = item.work->output;
                            if (root == context.communicator.rank() && to == nullptr)
                              to = const_cast<void*>(from);
                          }
                          return context.communicator.api().Broadcast(
                              from, to, static_cast<std::size_t>(item.signature->Bytes()),
                              DataType::kUint8, static_cast<int>(root), comm,
                              context.stream.handle());
                        });
}

Status LaunchAllGatherInto(const LaunchContext& context, const GroupTask& task) {
  // A rank that has joined gives zeros, the same for all, and drops what comes.
  std::byte* scratch = nullptr;
  const std::int64_t members = context.communicator.size();
  const std::int64_t largest = LargestScratch(task);
  if (task.joined() && largest > 0) {
    Status status = context.staging.Reserve(largest + members * SumOfScratch(task), &scratch);
    if (!status.ok()) return status;
    const cuda::Api& cuda = context.stream.device().api();
    status = cuda::Check(
        cuda,
        cuda.MemsetAsync(scratch, 0, static_cast<std::size_t>(largest), context.stream.handle()),
        "cudaMemsetAsync");
    if (!status.ok()) return status;
  }
  return ForEachInGroup(context, task, "ncclAllGather",
                        [&](CommHandle comm, const GroupItem& item, std::int64_t before) {
                          const void* from = nullptr;
                          void* to = nullptr;
                          if (item.work != nullptr) {
                            from = item.work->input;
                            to = item.work->output;
                          } else {
                            from = scratch;
                            to = scratch + largest + members * before;
                          }
                          return context.communicator.api().AllGather(
                              from, to, static_cast<std::size_t>(item.signature->Bytes()),
                              DataType::kUint8, comm, context.stream.handle());
                        });
}

Status LaunchExchange(const LaunchContext& context, const GroupTask& task) {
  for (const GroupItem& item : task.items) {
    if (item.work == nullptr) continue;
    cuda::AsDeviceWork(*item.work).lane_stream = context.stream.handle();
  }
  std::vector<CopySegment> kept;
  std::vector<CopySegment> gathered;
  Slices slices;
  Status status = context.rows->Place(
      [&kept](const void* from, void* to, std::int64_t count) {
        if (from != to) kept.push_back({from, to, count});
      },
      &slices,
      [&gathered](const void* from, void* to, std::int64_t count) {
        gathered.push_back({from, to, count});
      });
  if (status.ok()) {
    status = context.kernels.Copy(DType::kU8, DType::kU8, kept, {}, {}, context.stream.handle());
  }
  if (status.ok()) status = context.Exchange(slices.outgoing(), slices.incoming());
  return status.ok() && !gathered.empty() ? GatherEven(context, gathered) : status;
}

}  // namespace sirtaki::ops::nccl
