#include "sirtaki/collectives.h"

#include <utility>

#include "frameworks/torch/compression.h"
#include "frameworks/torch/pending_tensor.h"
#include "frameworks/torch/session_state.h"
#include "frameworks/torch/throw.h"

namespace sirtaki {
namespace {

using detail::TensorCall;

enum class Form { kNew, kInPlace };

core::ReduceOp Translate(ReduceOp op) {
  return op == ReduceOp::Average ? core::ReduceOp::kAverage : core::ReduceOp::kSum;
}

TensorCall AllreduceCall(const at::Tensor& tensor, const AllreduceOptions& options, Form form,
                         const Session& session) {
  TensorCall call;
  call.kind = core::OpKind::kAllReduce;
  call.tensor = tensor;
  call.name = options.name();
  call.in_place = form == Form::kInPlace;
  call.reduction = Translate(options.op());
  call.prescale = options.prescale();
  call.postscale = options.postscale();
  call.timeout = options.timeout();
  // An undefined tensor has no type; that it is undefined is told to all ranks later.
  if (options.compression() != Compression::None && tensor.defined()) {
    call.wire = detail::WireType(options.compression(), options.compression_scope(),
                                 detail::StateOf(session)->topology(), tensor.scalar_type());
  }
  return call;
}

TensorCall AllgatherCall(const at::Tensor& tensor, const AllgatherOptions& options) {
  TensorCall call;
  call.kind = core::OpKind::kAllGather;
  call.tensor = tensor;
  call.name = options.name();
  call.timeout = options.timeout();
  return call;
}

TensorCall BroadcastCall(const at::Tensor& tensor, int root_rank, const BroadcastOptions& options,
                         Form form) {
  TensorCall call;
  call.kind = core::OpKind::kBroadcast;
  call.tensor = tensor;
  call.name = options.name();
  call.in_place = form == Form::kInPlace;
  call.root = root_rank;
  call.timeout = options.timeout();
  return call;
}

Handle Start(TensorCall call, const Session& session) {
  return Handle(detail::PendingTensor::Start(std::move(call), detail::StateOf(session)));
}

at::Tensor Run(TensorCall call, const Session& session) {
  call.will_wait = true;
  return detail::PendingTensor::Start(std::move(call), detail::StateOf(session))->Synchronize();
}

detail::PendingTensor& PendingOf(const Handle& handle) {
  if (!handle.valid()) {
    detail::ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                                     "the handle is empty: it came from no operation"));
  }
  return *handle.pending();
}

}  // namespace

bool poll(const Handle& handle) { return PendingOf(handle).Poll(); }
at::Tensor synchronize(const Handle& handle) { return PendingOf(handle).Synchronize(); }

at::Tensor allreduce(const at::Tensor& tensor, const AllreduceOptions& options,
                     const Session& session) {
  return Run(AllreduceCall(tensor, options, Form::kNew, session), session);
}

at::Tensor allreduce_(const at::Tensor& tensor, const AllreduceOptions& options,
                      const Session& session) {
  return Run(AllreduceCall(tensor, options, Form::kInPlace, session), session);
}

Handle allreduce_async(const at::Tensor& tensor, const AllreduceOptions& options,
                       const Session& session) {
  return Start(AllreduceCall(tensor, options, Form::kNew, session), session);
}

Handle allreduce_async_(const at::Tensor& tensor, const AllreduceOptions& options,
                        const Session& session) {
  return Start(AllreduceCall(tensor, options, Form::kInPlace, session), session);
}

at::Tensor allgather(const at::Tensor& tensor, const AllgatherOptions& options,
                     const Session& session) {
  return Run(AllgatherCall(tensor, options), session);
}

Handle allgather_async(const at::Tensor& tensor, const AllgatherOptions& options,
                       const Session& session) {
  return Start(AllgatherCall(tensor, options), session);
}

at::Tensor broadcast(const at::Tensor& tensor, int root_rank, const BroadcastOptions& options,
                     const Session& session) {
  return Run(BroadcastCall(tensor, root_rank, options, Form::kNew), session);
}

at::Tensor broadcast_(const at::Tensor& tensor, int root_rank, const BroadcastOptions& options,
                      const Session& session) {
  return Run(BroadcastCall(tensor, root_rank, options, Form::kInPlace), session);
}

Handle broadcast_async(const at::Tensor& tensor, int root_rank, const BroadcastOptions& options,
                       const Session& session) {
  return Start(BroadcastCall(tensor, root_rank, options, Form::kNew), session);
}

Handle broadcast_async_(const at::Tensor& tensor, int root_rank, const BroadcastOptions& options,
                        const Session& session) {
  return Start(BroadcastCall(tensor, root_rank, options, Form::kInPlace), session);
}

}  // namespace sirtaki
