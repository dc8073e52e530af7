// Clipping of the gradients of a model of which an optimizer has a part.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>

namespace sirtaki::detail {

// ClipWithOthers tells of the other parts of the model. Empty: there are none.
struct ClipWithOthers {
  // Whether this part counts the gradient of the parameter, which another part may count. Without
  // effect on gradients that are kept in shards.
  std::function<bool(const at::Tensor& parameter)> counts;
  // Gives the norm of the whole model for that of this part.
  std::function<double(double norm)> combine;
};

// Does what clip_grad_norm_ does.
double ClipGradients(torch::optim::Optimizer& optimizer, double max_norm, double norm_type,
                     bool error_if_nonfinite, const ClipWithOthers& others);

}  // namespace sirtaki::detail
