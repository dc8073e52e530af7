#include "frameworks/torch/gradients/step_deltas.h"

#include <ATen/core/grad_mode.h>

#include <exception>
#include <utility>

#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/pending_tensor.h"

namespace sirtaki::detail {

void StepDeltas::Remember(const std::string& key, const at::Tensor& parameter) {
  entries_.push_back({key, parameter, parameter.detach().clone()});
}

std::shared_ptr<Pending> StepDeltas::Submit(const Entry& entry) const {
  // The parameter's own memory holds the difference meanwhile: no third copy of the weights.
  TensorCall call = OwnCall(core::OpKind::kAllReduce, entry.parameter.detach().sub_(entry.start),
                            entry.key, set_);
  call.reduction = core::ReduceOp::kAdasum;
  call.will_wait = false;
  call.in_place = true;
  return PendingTensor::Start(std::move(call), set_.session);
}

void StepDeltas::Combine() {
  const at::NoGradGuard no_grad;
  std::exception_ptr error;
  std::vector<std::shared_ptr<Pending>> pending;
  try {
    for (const Entry& entry : entries_) pending.push_back(Submit(entry));
  } catch (...) {
    // The group has failed; what was accepted is waited for all the same.
    error = std::current_exception();
  }
  try {
    AwaitAll(pending, error);
  } catch (...) {
    TakeBack();
    throw;
  }
  for (const Entry& entry : entries_) entry.parameter.detach().add_(entry.start);
}

void StepDeltas::TakeBack() {
  const at::NoGradGuard no_grad;
  for (const Entry& entry : entries_) entry.parameter.detach().copy_(entry.start);
}

}  // namespace sirtaki::detail
