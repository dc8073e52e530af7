#include "sirtaki/barrier.h"

#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/session/set_membership.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

using detail::PendingTensor;
using detail::TensorCall;

TensorCall BarrierCall(const BarrierOptions& options) {
  TensorCall call;
  call.kind = core::OpKind::kBarrier;
  call.name = options.name();
  call.process_set = options.process_set();
  call.timeout = options.timeout();
  return call;
}

void Run(TensorCall call) {
  call.will_wait = true;
  PendingTensor::Start(std::move(call), detail::CurrentSession())->Results();
}

[[noreturn]] void Refuse(const std::string& text) {
  detail::ThrowStatus(core::Status(core::StatusCode::kInvalidArgument, text));
}

}  // namespace

void barrier(const BarrierOptions& options) { Run(BarrierCall(options)); }

Handle barrier_async(const BarrierOptions& options) {
  return Handle(PendingTensor::Start(BarrierCall(options), detail::CurrentSession()));
}

void monitored_barrier(std::chrono::milliseconds timeout, const BarrierOptions& options) {
  TensorCall call = BarrierCall(options);
  call.timeout = timeout;
  if (timeout.count() <= 0) {
    call.invalid =
        "a monitored barrier needs a timeout above zero, not " + core::DurationText(timeout);
  }
  Run(std::move(call));
}

int join(const JoinOptions& options) {
  const auto state = detail::CurrentSession();
  detail::ThrowIfError(state->Check());
  const detail::CallMembers members = detail::MembersOf(options.process_set(), state);
  if (options.timeout().count() < 0) Refuse(detail::NegativeTimeoutText(options.timeout()));
  core::HandlePtr handle;
  detail::ThrowIfError(
      state->session().Join(members.set, detail::DeadlineAfter(options.timeout()), &handle));
  const core::Status ended = state->Wait(*handle);
  if (handle->done()) handle->Observe();
  detail::ThrowIfError(ended);
  ++*state->JoinsOf(members.set);
  return static_cast<int>(handle->value());
}

}  // namespace sirtaki
