// A fused step is made by one of LibTorch's fused operators, which goes over memory once, where the
// optimizer's own step makes a pass for each of its operations.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <typeinfo>

namespace sirtaki::detail {

// Makes the optimizer's step with the gradients that there are, and keeps its state as the optimizer
// itself would. Throws std::invalid_argument, before anything has changed, for a parameter or
// gradient that the operators cannot take.
using FusedStep = void (*)(torch::optim::Optimizer& optimizer);

// Returns the fused step of LibTorch's Adagrad, Adam, AdamW or SGD; null for any other class.
FusedStep FusedStepOf(const std::type_info& type);
// The reason why optimizers of this class have no fused step; empty if they have one.
std::string WhyNotFused(const std::type_info& type);

}  // namespace sirtaki::detail
