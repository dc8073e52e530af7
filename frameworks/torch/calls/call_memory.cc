#include "frameworks/torch/calls/call_memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <stdexcept>

#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {
namespace {

using core::OpKind;

std::vector<std::int64_t> WithRows(const at::Tensor& tensor, std::int64_t rows) {
  std::vector<std::int64_t> shape = tensor.sizes().vec();
  shape[0] = rows;
  return shape;
}

at::Tensor Copy(const at::Tensor& flat) {
  at::NoGradGuard no_grad;
  return flat.clone();
}

// The tensor itself where its memory is the caller's, so that a result is never an alias.
at::Tensor Owned(const at::Tensor& flat, const at::Tensor& tensor) {
  return flat.is_alias_of(tensor) ? Copy(flat) : flat;
}

// A gradient, for one: the other ranks may give what NCCL does not know.
bool LiesInArena(const at::Tensor& tensor, core::Work& work) {
  if (!IsOnGpu(tensor)) return false;
  const auto& device = ops::cuda::AsDeviceWork(work).device;
  return device != nullptr && device->InArena(tensor.const_data_ptr());
}

// Expects any number of rows like the input's. They go into `into` if that has memory for them all, or
// is undefined; else, as when a rank has joined, into new memory on all ranks alike: the caller compares.
std::shared_ptr<Arriving> ExpectRows(const at::Tensor& input, core::Work& work,
                                     const at::Tensor& into = {}) {
  auto arriving = std::make_shared<Arriving>();
  arriving->tensor = into;
  // It goes with the work.
  const auto* on_gpu = IsOnGpu(input) ? &ops::cuda::AsDeviceWork(work) : nullptr;
  work.allocate_output = [arriving, on_gpu, options = input.options(),
                          shape = WithRows(into.defined() ? into : input, 0)](
                             const std::vector<std::int64_t>& rows) mutable {
    shape[0] = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    arriving->rows = rows;
    if (arriving->tensor.defined() && arriving->tensor.size(0) == shape[0]) {
      return arriving->tensor.mutable_data_ptr();
    }
    const AllocatingStream of_lane(options.device(),
                                   on_gpu == nullptr ? nullptr : on_gpu->lane_stream);
    try {
      arriving->tensor = at::empty(shape, options);
    } catch (const c10::Error& error) {
      throw std::runtime_error(TextOf(error));  // all ranks see it
    }
    return arriving->tensor.mutable_data_ptr();
  };
  return arriving;
}

// Kinds whose rows may differ by rank.
CallMemory GiveRows(const TensorCall& call, std::size_t index, const CallMembers& members,
                    const at::Tensor& input, core::Work& work) {
  CallMemory memory;
  const bool root = call.root == members.rank;
  if (call.kind == OpKind::kGather && !root) {
    memory.result = at::empty(WithRows(input, 0), input.options());
  } else {
    memory.arriving = ExpectRows(input, work, call.into.empty() ? at::Tensor() : call.into[index]);
  }
  if (call.kind == OpKind::kScatter && !root) return memory;
  work.rows = input.size(0);
  work.input = input.const_data_ptr();
  if (call.kind == OpKind::kScatter || call.kind == OpKind::kAllToAll) {
    work.splits = call.SplitsOf(index);
  }
  return memory;
}

// Kinds whose result has the tensor's shape. `*input` is replaced where what is read is what is
// written.
CallMemory GiveLike(const TensorCall& call, const CallMembers& members, const at::Tensor& tensor,
                    at::Tensor* input) {
  CallMemory memory;
  const bool root = call.root == members.rank;
  if (call.kind == OpKind::kReduce && !root) {
    memory.result = call.in_place ? tensor : Owned(*input, tensor);
  } else if (call.in_place) {
    memory.result = tensor;
    memory.moved = *input;
    NoteOverwritten(tensor);
  } else if (call.kind == OpKind::kBroadcast) {
    // A copy on the root, so that its own tensor stays as it is; a buffer elsewhere.
    memory.moved = root ? Owned(*input, tensor) : at::empty_like(*input);
    memory.result = memory.moved;
    *input = memory.moved;
  } else {
    memory.moved = at::empty_like(*input);
    memory.result = memory.moved;
  }
  return memory;
}

// Kinds whose result has other rows, which all ranks know.
CallMemory GiveOtherRows(const TensorCall& call, const CallMembers& members,
                         const at::Tensor& input) {
  CallMemory memory;
  const std::int64_t rows = call.kind == OpKind::kAllGatherInto
                                ? input.size(0) * members.size()
                                : core::RowsOf(input.size(0), members.size(), members.index());
  memory.moved = at::empty(WithRows(input, rows), input.options());
  memory.result = memory.moved;
  return memory;
}

CallMemory GiveShaped(const TensorCall& call, const CallMembers& members, const at::Tensor& tensor,
                      at::Tensor* input, core::Work& work) {
  const bool has_other_rows =
      call.kind == OpKind::kAllGatherInto || call.kind == OpKind::kReduceScatter;
  CallMemory memory = has_other_rows ? GiveOtherRows(call, members, *input)
                                     : GiveLike(call, members, tensor, input);
  // The output comes first: memory that several tensors share until one is written moves when it
  // is.
  work.output = memory.moved.defined() ? memory.moved.mutable_data_ptr() : nullptr;
  work.input = input->const_data_ptr();
  return memory;
}

}  // namespace

bool CallMemory::Settle() {
  if (arriving) result = arriving->tensor;
  if (arriving || !moved.defined() || moved.is_alias_of(result)) return false;
  at::NoGradGuard no_grad;
  result.detach().copy_(moved);
  return true;
}

CallMemory GiveMemory(const TensorCall& call, std::size_t index, const CallMembers& members,
                      core::Work& work, CallStorages* storages) {
  const at::Tensor& tensor = call.at(index);
  at::Tensor input = LiesFlat(tensor) ? tensor : Flat(tensor);
  if (LiesInArena(input, work)) input = Copy(input);
  CallMemory memory = core::FirstDimensionVaries(call.kind)
                          ? GiveRows(call, index, members, input, work)
                          : GiveShaped(call, members, tensor, &input, work);
  storages->input = input.storage();
  if (memory.moved.defined()) storages->output = memory.moved.storage();
  return memory;
}

}  // namespace sirtaki::detail
