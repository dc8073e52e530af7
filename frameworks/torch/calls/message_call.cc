#include "frameworks/torch/calls/message_call.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <string>
#include <utility>

#include "frameworks/torch/calls/call_memory.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "ops/base/backend.h"

namespace sirtaki::detail {
namespace {

bool IsSend(const P2POp& operation) { return operation.kind == P2POp::Kind::Send; }

core::Signature SignatureOf(const P2POp& operation) {
  core::Signature signature = Describe(operation.tensor);
  signature.kind = IsSend(operation) ? core::OpKind::kSend : core::OpKind::kReceive;
  return signature;
}

// "send to rank 1, tag 3"
std::string TextOfMessage(const P2POp& operation) {
  return std::string(IsSend(operation) ? "send to" : "receive from") + " rank " +
         std::to_string(operation.peer) + ", tag " + std::to_string(operation.tag);
}

std::string WhyWrong(const P2POp& operation, const MessageOptions& options, int size) {
  if (operation.peer < 0 || operation.peer >= size) {
    return "the ranks are 0 to " + std::to_string(size - 1);
  }
  if (operation.tag < 0 || operation.tag > ops::Backend::kMaxTag) {
    return "the tag must be 0 to " + std::to_string(ops::Backend::kMaxTag);
  }
  if (std::string why = WhyNotMovable(operation.tensor); !why.empty()) return why;
  if (!IsSend(operation) && at::has_internal_overlap(operation.tensor) == at::MemOverlap::Yes) {
    return "the tensor's elements share memory (expanded); make it contiguous first";
  }
  if (options.timeout().count() < 0) return NegativeTimeoutText(options.timeout());
  return {};
}

[[noreturn]] void Refuse(const P2POp& operation, const core::Status& why,
                         const SessionState& session) {
  ThrowStatus(core::Status(why.code(), TextOfMessage(operation) + ": " + why.message(),
                           core::Origin{session.topology().rank, session.topology().host, {}}));
}

// Where the tensor is; null: on the host. Throws Error if it cannot be used there, or now.
std::shared_ptr<session::Gpu> GpuOf(const P2POp& operation, SessionState& session) {
  std::shared_ptr<session::Gpu> gpu;
  const core::Status status = FindUsableGpu(operation.tensor, session, &gpu);
  if (!status.ok()) Refuse(operation, status, session);
  return gpu;
}

// Gives the work the memory of the tensor as it lies: what travels, and into what it is received.
CallMemory GiveMemory(const P2POp& operation, core::Work& work) {
  CallMemory memory;
  memory.result = operation.tensor;
  const at::Tensor flat = Flat(operation.tensor);
  if (IsSend(operation)) {
    work.input = flat.const_data_ptr();
  } else {
    memory.moved = flat;
    work.output = flat.mutable_data_ptr();
    NoteOverwritten(operation.tensor);
  }
  work.keep_alive = std::make_shared<at::Tensor>(flat);
  return memory;
}

}  // namespace

void CheckMessage(const P2POp& operation, const MessageOptions& options, SessionState& session) {
  const std::string why = WhyWrong(operation, options, session.topology().size);
  if (!why.empty()) Refuse(operation, {core::StatusCode::kInvalidArgument, why}, session);
  (void)GpuOf(operation, session);
}

std::shared_ptr<PendingTensor> StartMessage(const P2POp& operation, const MessageOptions& options,
                                            bool will_wait, std::shared_ptr<SessionState> session,
                                            const std::string& label) {
  at::NoGradGuard no_grad;
  const std::string what = TextOfMessage(operation) + (label.empty() ? "" : " (" + label + ")");
  const std::shared_ptr<session::Gpu> gpu = GpuOf(operation, *session);
  const auto on_gpu = gpu ? std::make_shared<ops::cuda::DeviceWork>() : nullptr;
  const core::WorkPtr work = on_gpu ? on_gpu : std::make_shared<core::Work>();
  work->request.asked = std::make_shared<core::Signature>(SignatureOf(operation));
  work->request.key = core::Key::Named(
      core::kWorldSet, "#" + what + ", message " + std::to_string(session->NextMessageNumber()));
  work->peer = operation.peer;
  work->tag = operation.tag;
  work->deadline = DeadlineAfter(options.timeout());

  CallMemories memory = {GiveMemory(operation, *work)};
  if (on_gpu) {
    on_gpu->device = gpu->device();
    memory[0].on_gpu = OnGpu{.gpu = gpu, .work = on_gpu, .caller = nullptr, .end = nullptr};
    if (const core::Status ready = NoteReadyOnGpus(memory); !ready.ok()) {
      Refuse(operation, ready, *session);
    }
  }
  return PendingTensor::StartWork(what, work, std::move(memory), will_wait, std::move(session));
}

}  // namespace sirtaki::detail
