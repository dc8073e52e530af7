// The blocking collectives as autograd sees them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/session/session_state.h"

namespace sirtaki::detail {

struct CallResults {
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<std::int64_t>> rows;  // as Pending::ReceivedRows
};

// Submits the call and waits. If a tensor of it requires a gradient, the results lead back to it:
// backward() through them makes the call that belongs to it, under a name that comes from this
// one's, which again is differentiable. Precondition: the call is not in place.
CallResults RunDifferentiable(TensorCall call, const std::shared_ptr<SessionState>& session);

}  // namespace sirtaki::detail
