#include "sirtaki/barrier.h"

#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/calls/call_forms.h"
#include "frameworks/torch/calls/early_call.h"
#include "frameworks/torch/session/set_membership.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

// A barrier has no result that a graph could lead through.
detail::TensorCall BarrierCall(const BarrierOptions& options) {
  return detail::CallOf(core::OpKind::kBarrier, options, detail::Form::kInPlace);
}

}  // namespace

void barrier(const BarrierOptions& options) { detail::RunAll(BarrierCall(options)); }

Handle barrier_async(const BarrierOptions& options) {
  return detail::StartCall(BarrierCall(options));
}

void monitored_barrier(std::chrono::milliseconds timeout, const BarrierOptions& options) {
  detail::TensorCall call = BarrierCall(options);
  call.timeout = timeout;
  if (timeout.count() <= 0) {
    call.invalid =
        "a monitored barrier needs a timeout above zero, not " + core::DurationText(timeout);
  }
  detail::RunAll(std::move(call));
}

int join(const JoinOptions& options) {
  const auto state = detail::CurrentSession();
  detail::ThrowIfError(state->Check());
  if (detail::IsEarlyCall(*state)) detail::RefuseEarlyCall("join()");
  const detail::CallMembers members = detail::MembersOf(options.process_set(), state);
  core::HandlePtr handle;
  detail::ThrowIfError(
      state->session().Join(members.set, detail::DeadlineOf(options.timeout()), &handle));
  const core::Status ended = state->Wait(*handle);
  if (handle->done()) handle->Observe();
  detail::ThrowIfError(ended);
  ++*state->JoinsOf(members.set);
  return static_cast<int>(handle->value());
}

}  // namespace sirtaki
