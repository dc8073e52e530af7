#include "sirtaki/reductions.h"

#include <utility>

#include "frameworks/torch/calls/call_forms.h"
#include "frameworks/torch/calls/sparse_call.h"
#include "frameworks/torch/tensors/compression.h"

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

core::ReduceOp Translate(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum:
      return core::ReduceOp::kSum;
    case ReduceOp::Average:
      return core::ReduceOp::kAverage;
    case ReduceOp::Min:
      return core::ReduceOp::kMin;
    case ReduceOp::Max:
      return core::ReduceOp::kMax;
    case ReduceOp::Product:
      return core::ReduceOp::kProduct;
    case ReduceOp::BitAnd:
      return core::ReduceOp::kBitAnd;
    case ReduceOp::BitOr:
      return core::ReduceOp::kBitOr;
    case ReduceOp::BitXor:
      return core::ReduceOp::kBitXor;
    case ReduceOp::Adasum:
      return core::ReduceOp::kAdasum;
  }
  return core::ReduceOp::kSum;
}

template <class Options>
TensorCall ReducingCall(OpKind kind, const Options& options, Form form) {
  TensorCall call = CallOf(kind, options, form);
  call.reduction = Translate(options.op());
  call.prescale = options.prescale();
  call.postscale = options.postscale();
  return call;
}

TensorCall AllreduceCall(const AllreduceOptions& options, Form form, const Session& session) {
  TensorCall call = ReducingCall(OpKind::kAllReduce, options, form);
  if (options.compression() != Compression::None) {
    // For tensors of this type, and those that are treated like it.
    call.wire = detail::WireType(options.compression(), options.compression_scope(),
                                 detail::StateOf(session)->topology(), at::kFloat);
  }
  return call;
}

TensorCall ReduceCall(int root_rank, const ReduceOptions& options, Form form) {
  TensorCall call = ReducingCall(OpKind::kReduce, options, form);
  call.root = root_rank;
  return call;
}

TensorCall ReducescatterCall(const ReducescatterOptions& options, Form form) {
  TensorCall call = ReducingCall(OpKind::kReduceScatter, options, form);
  if (call.reduction != core::ReduceOp::kSum && call.reduction != core::ReduceOp::kAverage &&
      call.reduction != core::ReduceOp::kMin && call.reduction != core::ReduceOp::kMax) {
    call.invalid = "reduce-scatter takes sum, average, min and max, not " +
                   std::string(core::ReduceOpName(call.reduction));
  }
  return call;
}

TensorCall InPlaceCall(const at::Tensor& tensor, const AllreduceOptions& options,
                       const Session& session) {
  TensorCall call = With(AllreduceCall(options, Form::kInPlace, session), tensor);
  if (detail::IsSparse(tensor)) {
    call.invalid = "a sparse tensor cannot be reduced in place: use allreduce()";
  }
  return call;
}

}  // namespace

at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options,
                     const Session& session) {
  if (detail::IsSparse(tensor)) return sparse_allreduce(tensor, options, session);
  return RunOne(With(AllreduceCall(options, Form::kNew, session), tensor), session);
}

at::Tensor allreduce_(const at::Tensor& tensor, const AllreduceOptions& options,
                      const Session& session) {
  return RunOne(InPlaceCall(tensor, options, session), session);
}

Handle allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options,
                       const Session& session) {
  if (detail::IsSparse(tensor)) return sparse_allreduce_async(tensor, options, session);
  return StartCall(With(AllreduceCall(options, Form::kNew, session), tensor), session);
}

Handle allreduce_async_(const at::Tensor& tensor, const AllreduceOptions& options,
                        const Session& session) {
  return StartCall(InPlaceCall(tensor, options, session), session);
}

std::vector<at::Tensor> grouped_allreduce(const std::vector<at::Tensor>& tensors,
                                          const AllreduceOptions& options, const Session& session) {
  return RunAll(With(AllreduceCall(options, Form::kNew, session), tensors), session);
}

std::vector<at::Tensor> grouped_allreduce_(const std::vector<at::Tensor>& tensors,
                                           const AllreduceOptions& options,
                                           const Session& session) {
  return RunAll(With(AllreduceCall(options, Form::kInPlace, session), tensors), session);
}

GroupedHandle grouped_allreduce_async(const std::vector<at::Tensor>& tensors,
                                      const AllreduceOptions& options, const Session& session) {
  return StartCall<GroupedHandle>(With(AllreduceCall(options, Form::kNew, session), tensors),
                                  session);
}

GroupedHandle grouped_allreduce_async_(const std::vector<at::Tensor>& tensors,
                                       const AllreduceOptions& options, const Session& session) {
  return StartCall<GroupedHandle>(With(AllreduceCall(options, Form::kInPlace, session), tensors),
                                  session);
}

at::Tensor sparse_allreduce(const at::Tensor& tensor, const AllreduceOptions& options,
                            const Session& session) {
  return detail::StartSparse(tensor, options, /*will_wait=*/true, detail::StateOf(session))
      ->Results()
      .front();
}

Handle sparse_allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options,
                              const Session& session) {
  return Handle(
      detail::StartSparse(tensor, options, /*will_wait=*/false, detail::StateOf(session)));
}

at::Tensor reduce(const at::Tensor& tensor, int root_rank, const ReduceOptions& options,
                  const Session& session) {
  return RunOne(With(ReduceCall(root_rank, options, Form::kNew), tensor), session);
}

at::Tensor reduce_(const at::Tensor& tensor, int root_rank, const ReduceOptions& options,
                   const Session& session) {
  return RunOne(With(ReduceCall(root_rank, options, Form::kInPlace), tensor), session);
}

Handle reduce_async(const at::Tensor& tensor, int root_rank, const ReduceOptions& options,
                    const Session& session) {
  return StartCall(With(ReduceCall(root_rank, options, Form::kNew), tensor), session);
}

Handle reduce_async_(const at::Tensor& tensor, int root_rank, const ReduceOptions& options,
                     const Session& session) {
  return StartCall(With(ReduceCall(root_rank, options, Form::kInPlace), tensor), session);
}

std::vector<at::Tensor> grouped_reduce(const std::vector<at::Tensor>& tensors, int root_rank,
                                       const ReduceOptions& options, const Session& session) {
  return RunAll(With(ReduceCall(root_rank, options, Form::kNew), tensors), session);
}

std::vector<at::Tensor> grouped_reduce_(const std::vector<at::Tensor>& tensors, int root_rank,
                                        const ReduceOptions& options, const Session& session) {
  return RunAll(With(ReduceCall(root_rank, options, Form::kInPlace), tensors), session);
}

GroupedHandle grouped_reduce_async(const std::vector<at::Tensor>& tensors, int root_rank,
                                   const ReduceOptions& options, const Session& session) {
  return StartCall<GroupedHandle>(With(ReduceCall(root_rank, options, Form::kNew), tensors),
                                  session);
}

GroupedHandle grouped_reduce_async_(const std::vector<at::Tensor>& tensors, int root_rank,
                                    const ReduceOptions& options, const Session& session) {
  return StartCall<GroupedHandle>(With(ReduceCall(root_rank, options, Form::kInPlace), tensors),
                                  session);
}

at::Tensor reducescatter(const at::Tensor& tensor, const ReducescatterOptions& options,
                         const Session& session) {
  return RunOne(With(ReducescatterCall(options, Form::kNew), tensor), session);
}

Handle reducescatter_async(const at::Tensor& tensor, const ReducescatterOptions& options,
                           const Session& session) {
  return StartCall(With(ReducescatterCall(options, Form::kNew), tensor), session);
}

std::vector<at::Tensor> grouped_reducescatter(const std::vector<at::Tensor>& tensors,
                                              const ReducescatterOptions& options,
                                              const Session& session) {
  return RunAll(With(ReducescatterCall(options, Form::kNew), tensors), session);
}

GroupedHandle grouped_reducescatter_async(const std::vector<at::Tensor>& tensors,
                                          const ReducescatterOptions& options,
                                          const Session& session) {
  return StartCall<GroupedHandle>(With(ReducescatterCall(options, Form::kNew), tensors), session);
}

}  // namespace sirtaki
