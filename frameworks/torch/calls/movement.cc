#include "sirtaki/movement.h"

#include <utility>

#include "frameworks/torch/calls/call_forms.h"

namespace sirtaki {
namespace {

using core::OpKind;
using detail::CallOf;
using detail::Form;
using detail::RunAll;
using detail::RunOne;
using detail::StartCall;
using detail::TensorCall;
using detail::With;

TensorCall BroadcastCall(int root_rank, const BroadcastOptions& options, Form form) {
  TensorCall call = CallOf(OpKind::kBroadcast, options, form);
  call.root = root_rank;
  return call;
}

TensorCall AllgatherCall(const AllgatherOptions& options, Form form) {
  return CallOf(OpKind::kAllGather, options, form);
}

TensorCall AllgatherIntoCall(const AllgatherOptions& options, Form form) {
  return CallOf(OpKind::kAllGatherInto, options, form);
}

TensorCall GatherCall(int root_rank, const GatherOptions& options, Form form) {
  TensorCall call = CallOf(OpKind::kGather, options, form);
  call.root = root_rank;
  return call;
}

TensorCall ScatterCall(int root_rank, const ScatterOptions& options, Form form) {
  TensorCall call = CallOf(OpKind::kScatter, options, form);
  call.root = root_rank;
  if (!options.splits().empty()) call.splits = {options.splits()};
  return call;
}

TensorCall AlltoallCall(const AlltoallOptions& options) {
  TensorCall call = CallOf(OpKind::kAllToAll, options, Form::kNew);
  if (!options.splits().empty()) call.splits = {options.splits()};
  return call;
}

std::vector<AlltoallResult> RunAlltoall(TensorCall call, const Session& session) {
  detail::CallResults results =
      detail::RunDifferentiable(std::move(call), detail::StateOf(session));
  std::vector<AlltoallResult> pairs;
  for (std::size_t i = 0; i < results.tensors.size(); ++i) {
    pairs.push_back({std::move(results.tensors[i]), std::move(results.rows[i])});
  }
  return pairs;
}

}  // namespace

at::Tensor broadcast(const at::Tensor& tensor, int root_rank, const BroadcastOptions& options,
                     const Session& session) {
  return RunOne(With(BroadcastCall(root_rank, options, Form::kNew), tensor), session);
}

at::Tensor broadcast_(const at::Tensor& tensor, int root_rank, const BroadcastOptions& options,
                      const Session& session) {
  return RunOne(With(BroadcastCall(root_rank, options, Form::kInPlace), tensor), session);
}

Handle broadcast_async(const at::Tensor& tensor, int root_rank, const BroadcastOptions& options,
                       const Session& session) {
  return StartCall(With(BroadcastCall(root_rank, options, Form::kNew), tensor), session);
}

Handle broadcast_async_(const at::Tensor& tensor, int root_rank, const BroadcastOptions& options,
                        const Session& session) {
  return StartCall(With(BroadcastCall(root_rank, options, Form::kInPlace), tensor), session);
}

std::vector<at::Tensor> grouped_broadcast(const std::vector<at::Tensor>& tensors, int root_rank,
                                          const BroadcastOptions& options, const Session& session) {
  return RunAll(With(BroadcastCall(root_rank, options, Form::kNew), tensors), session);
}

std::vector<at::Tensor> grouped_broadcast_(const std::vector<at::Tensor>& tensors, int root_rank,
                                           const BroadcastOptions& options,
                                           const Session& session) {
  return RunAll(With(BroadcastCall(root_rank, options, Form::kInPlace), tensors), session);
}

GroupedHandle grouped_broadcast_async(const std::vector<at::Tensor>& tensors, int root_rank,
                                      const BroadcastOptions& options, const Session& session) {
  return StartCall<GroupedHandle>(With(BroadcastCall(root_rank, options, Form::kNew), tensors),
                                  session);
}

GroupedHandle grouped_broadcast_async_(const std::vector<at::Tensor>& tensors, int root_rank,
                                       const BroadcastOptions& options, const Session& session) {
  return StartCall<GroupedHandle>(With(BroadcastCall(root_rank, options, Form::kInPlace), tensors),
                                  session);
}

at::Tensor allgather(const at::Tensor& tensor, const AllgatherOptions& options,
                     const Session& session) {
  return RunOne(With(AllgatherCall(options, Form::kNew), tensor), session);
}

Handle allgather_async(const at::Tensor& tensor, const AllgatherOptions& options,
                       const Session& session) {
  return StartCall(With(AllgatherCall(options, Form::kNew), tensor), session);
}

std::vector<at::Tensor> grouped_allgather(const std::vector<at::Tensor>& tensors,
                                          const AllgatherOptions& options, const Session& session) {
  return RunAll(With(AllgatherCall(options, Form::kNew), tensors), session);
}

GroupedHandle grouped_allgather_async(const std::vector<at::Tensor>& tensors,
                                      const AllgatherOptions& options, const Session& session) {
  return StartCall<GroupedHandle>(With(AllgatherCall(options, Form::kNew), tensors), session);
}

at::Tensor allgather_into(const at::Tensor& tensor, const AllgatherOptions& options,
                          const Session& session) {
  return RunOne(With(AllgatherIntoCall(options, Form::kNew), tensor), session);
}

Handle allgather_into_async(const at::Tensor& tensor, const AllgatherOptions& options,
                            const Session& session) {
  return StartCall(With(AllgatherIntoCall(options, Form::kNew), tensor), session);
}

std::vector<at::Tensor> grouped_allgather_into(const std::vector<at::Tensor>& tensors,
                                               const AllgatherOptions& options,
                                               const Session& session) {
  return RunAll(With(AllgatherIntoCall(options, Form::kNew), tensors), session);
}

GroupedHandle grouped_allgather_into_async(const std::vector<at::Tensor>& tensors,
                                           const AllgatherOptions& options,
                                           const Session& session) {
  return StartCall<GroupedHandle>(With(AllgatherIntoCall(options, Form::kNew), tensors), session);
}

at::Tensor gather(const at::Tensor& tensor, int root_rank, const GatherOptions& options,
                  const Session& session) {
  return RunOne(With(GatherCall(root_rank, options, Form::kNew), tensor), session);
}

Handle gather_async(const at::Tensor& tensor, int root_rank, const GatherOptions& options,
                    const Session& session) {
  return StartCall(With(GatherCall(root_rank, options, Form::kNew), tensor), session);
}

std::vector<at::Tensor> grouped_gather(const std::vector<at::Tensor>& tensors, int root_rank,
                                       const GatherOptions& options, const Session& session) {
  return RunAll(With(GatherCall(root_rank, options, Form::kNew), tensors), session);
}

GroupedHandle grouped_gather_async(const std::vector<at::Tensor>& tensors, int root_rank,
                                   const GatherOptions& options, const Session& session) {
  return StartCall<GroupedHandle>(With(GatherCall(root_rank, options, Form::kNew), tensors),
                                  session);
}

at::Tensor scatter(const at::Tensor& tensor, int root_rank, const ScatterOptions& options,
                   const Session& session) {
  return RunOne(With(ScatterCall(root_rank, options, Form::kNew), tensor), session);
}

Handle scatter_async(const at::Tensor& tensor, int root_rank, const ScatterOptions& options,
                     const Session& session) {
  return StartCall(With(ScatterCall(root_rank, options, Form::kNew), tensor), session);
}

std::vector<at::Tensor> grouped_scatter(const std::vector<at::Tensor>& tensors, int root_rank,
                                        const ScatterOptions& options, const Session& session) {
  return RunAll(With(ScatterCall(root_rank, options, Form::kNew), tensors), session);
}

GroupedHandle grouped_scatter_async(const std::vector<at::Tensor>& tensors, int root_rank,
                                    const ScatterOptions& options, const Session& session) {
  return StartCall<GroupedHandle>(With(ScatterCall(root_rank, options, Form::kNew), tensors),
                                  session);
}

AlltoallResult alltoall(const at::Tensor& tensor, const AlltoallOptions& options,
                        const Session& session) {
  return std::move(RunAlltoall(With(AlltoallCall(options), tensor), session).front());
}

Handle alltoall_async(const at::Tensor& tensor, const AlltoallOptions& options,
                      const Session& session) {
  return StartCall(With(AlltoallCall(options), tensor), session);
}

std::vector<AlltoallResult> grouped_alltoall(const std::vector<at::Tensor>& tensors,
                                             const AlltoallOptions& options,
                                             const Session& session) {
  return RunAlltoall(With(AlltoallCall(options), tensors), session);
}

GroupedHandle grouped_alltoall_async(const std::vector<at::Tensor>& tensors,
                                     const AlltoallOptions& options, const Session& session) {
  return StartCall<GroupedHandle>(With(AlltoallCall(options), tensors), session);
}

}  // namespace sirtaki
