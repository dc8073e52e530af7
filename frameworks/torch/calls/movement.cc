#include "sirtaki/movement.h"

#include <utility>

#include "frameworks/torch/calls/call_forms.h"

namespace sirtaki {
namespace {

using core::OpKind;
using detail::CallOf;
using detail::Form;
using detail::StartCall;
using detail::TensorCall;
using detail::With;

TensorCall BroadcastCall(int root_rank, const BroadcastOptions& options, Form form) {
  TensorCall call = CallOf(OpKind::kBroadcast, options, form);
  call.root = root_rank;
  return call;
}

TensorCall GatherCall(int root_rank, const GatherOptions& options) {
  TensorCall call = CallOf(OpKind::kGather, options, Form::kNew);
  call.root = root_rank;
  return call;
}

TensorCall ScatterCall(int root_rank, const ScatterOptions& options) {
  TensorCall call = CallOf(OpKind::kScatter, options, Form::kNew);
  call.root = root_rank;
  if (!options.splits().empty()) call.splits = {options.splits()};
  return call;
}

TensorCall AlltoallCall(const AlltoallOptions& options) {
  TensorCall call = CallOf(OpKind::kAllToAll, options, Form::kNew);
  if (!options.splits().empty()) call.splits = {options.splits()};
  return call;
}

std::vector<AlltoallResult> RunAlltoall(TensorCall call) {
  detail::CallResults results =
      detail::RunDifferentiable(std::move(call), detail::CurrentSession());
  std::vector<AlltoallResult> pairs;
  for (std::size_t i = 0; i < results.tensors.size(); ++i) {
    pairs.push_back({std::move(results.tensors[i]), std::move(results.rows[i])});
  }
  return pairs;
}

}  // namespace

SIRTAKI_FORMS(broadcast, , (int root_rank, const BroadcastOptions& options),
              BroadcastCall(root_rank, options, Form::kNew))
SIRTAKI_FORMS(broadcast, _, (int root_rank, const BroadcastOptions& options),
              BroadcastCall(root_rank, options, Form::kInPlace))
SIRTAKI_FORMS(allgather, , (const AllgatherOptions& options),
              CallOf(OpKind::kAllGather, options, Form::kNew))
SIRTAKI_FORMS(allgather_into, , (const AllgatherOptions& options),
              CallOf(OpKind::kAllGatherInto, options, Form::kNew))
SIRTAKI_FORMS(gather, , (int root_rank, const GatherOptions& options),
              GatherCall(root_rank, options))
SIRTAKI_FORMS(scatter, , (int root_rank, const ScatterOptions& options),
              ScatterCall(root_rank, options))

AlltoallResult alltoall(const at::Tensor& tensor, const AlltoallOptions& options) {
  return std::move(RunAlltoall(With(AlltoallCall(options), tensor)).front());
}

Handle alltoall_async(const at::Tensor& tensor, const AlltoallOptions& options) {
  return StartCall(With(AlltoallCall(options), tensor));
}

std::vector<AlltoallResult> alltoall(at::TensorList tensors, const AlltoallOptions& options) {
  return RunAlltoall(With(AlltoallCall(options), tensors));
}

GroupedHandle alltoall_async(at::TensorList tensors, const AlltoallOptions& options) {
  return StartCall<GroupedHandle>(With(AlltoallCall(options), tensors));
}

}  // namespace sirtaki
