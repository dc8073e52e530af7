#include "sirtaki/reductions.h"

#include "frameworks/torch/calls/call_forms.h"
#include "frameworks/torch/calls/sparse_call.h"
#include "frameworks/torch/tensors/compression.h"

namespace sirtaki {
namespace {

using core::OpKind;
using detail::CallOf;
using detail::Form;
using detail::RunOne;
using detail::StartCall;
using detail::TensorCall;
using detail::With;

// Both have the same order.
constexpr core::ReduceOp Translate(ReduceOp op) { return static_cast<core::ReduceOp>(op); }
static_assert(Translate(ReduceOp::Sum) == core::ReduceOp::kSum &&
              Translate(ReduceOp::Average) == core::ReduceOp::kAverage &&
              Translate(ReduceOp::Min) == core::ReduceOp::kMin &&
              Translate(ReduceOp::Max) == core::ReduceOp::kMax &&
              Translate(ReduceOp::Product) == core::ReduceOp::kProduct &&
              Translate(ReduceOp::BitAnd) == core::ReduceOp::kBitAnd &&
              Translate(ReduceOp::BitOr) == core::ReduceOp::kBitOr &&
              Translate(ReduceOp::BitXor) == core::ReduceOp::kBitXor &&
              Translate(ReduceOp::Adasum) == core::ReduceOp::kAdasum);

template <class Options>
TensorCall ReducingCall(OpKind kind, const Options& options, Form form) {
  TensorCall call = CallOf(kind, options, form);
  call.reduction = Translate(options.op());
  call.prescale = options.prescale();
  call.postscale = options.postscale();
  return call;
}

TensorCall AllreduceCall(const AllreduceOptions& options, Form form) {
  TensorCall call = ReducingCall(OpKind::kAllReduce, options, form);
  if (options.compression() != Compression::None) {
    // The call says what tensors of this type travel as, and those that are treated like it.
    call.wire = detail::WireType(options.compression(), options.compression_scope(),
                                 detail::CurrentSession()->topology(), at::kFloat);
  }
  return call;
}

TensorCall ReduceCall(int root_rank, const ReduceOptions& options, Form form) {
  TensorCall call = ReducingCall(OpKind::kReduce, options, form);
  call.root = root_rank;
  return call;
}

TensorCall ReducescatterCall(const ReducescatterOptions& options) {
  TensorCall call = ReducingCall(OpKind::kReduceScatter, options, Form::kNew);
  if (call.reduction != core::ReduceOp::kSum && call.reduction != core::ReduceOp::kAverage &&
      call.reduction != core::ReduceOp::kMin && call.reduction != core::ReduceOp::kMax) {
    call.invalid = "reduce-scatter takes sum, average, min and max, not " +
                   std::string(core::ReduceOpName(call.reduction));
  }
  return call;
}

TensorCall InPlaceCall(const at::Tensor& tensor, const AllreduceOptions& options) {
  TensorCall call = AllreduceCall(options, Form::kInPlace);
  call.tensor = tensor;
  if (tensor.is_sparse()) {
    call.invalid = "a sparse tensor cannot be reduced in place: use allreduce()";
  }
  return call;
}

}  // namespace

at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  if (tensor.is_sparse()) return sparse_allreduce(tensor, options);
  return RunOne(With(AllreduceCall(options, Form::kNew), tensor));
}

at::Tensor allreduce_(const at::Tensor& tensor, const AllreduceOptions& options) {
  return RunOne(InPlaceCall(tensor, options));
}

Handle allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options) {
  if (tensor.is_sparse()) return sparse_allreduce_async(tensor, options);
  return StartCall(With(AllreduceCall(options, Form::kNew), tensor));
}

Handle allreduce_async_(const at::Tensor& tensor, const AllreduceOptions& options) {
  return StartCall(InPlaceCall(tensor, options));
}

SIRTAKI_LIST_FORMS(allreduce, , (const AllreduceOptions& options),
                   AllreduceCall(options, Form::kNew))
SIRTAKI_LIST_FORMS(allreduce, _, (const AllreduceOptions& options),
                   AllreduceCall(options, Form::kInPlace))

at::Tensor sparse_allreduce(const at::Tensor& tensor, const AllreduceOptions& options) {
  return detail::StartSparse(tensor, options, /*will_wait=*/true, detail::CurrentSession())
      ->Results()
      .front();
}

Handle sparse_allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options) {
  return Handle(
      detail::StartSparse(tensor, options, /*will_wait=*/false, detail::CurrentSession()));
}

SIRTAKI_FORMS(reduce, , (int root_rank, const ReduceOptions& options),
              ReduceCall(root_rank, options, Form::kNew))
SIRTAKI_FORMS(reduce, _, (int root_rank, const ReduceOptions& options),
              ReduceCall(root_rank, options, Form::kInPlace))
SIRTAKI_FORMS(reducescatter, , (const ReducescatterOptions& options), ReducescatterCall(options))

}  // namespace sirtaki
