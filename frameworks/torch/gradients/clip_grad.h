// Clipping of the gradients of a model of which an optimizer may have a part.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>

namespace sirtaki::detail {

// Throws InvalidArgument if no norm may be limited to this.
void CheckMaxNorm(double max_norm);

// Whether a part of a model counts the gradient of the parameter, which another part may count. Empty:
// it counts all. Without effect on gradients that are kept in shards.
using CountsGradient = std::function<bool(const at::Tensor& parameter)>;

// NormOfGradients and ScaleGradients are the two halves of clip_grad_norm_; the norm that the second one
// takes may be that of more gradients.
double NormOfGradients(torch::optim::Optimizer& optimizer, double norm_type,
                       const CountsGradient& counts = nullptr);
void ScaleGradients(torch::optim::Optimizer& optimizer, double max_norm, double norm,
                    bool error_if_nonfinite);

}  // namespace sirtaki::detail
