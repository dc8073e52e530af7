// What is known of the state that LibTorch's optimizers keep for a parameter, and where it lies.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <vector>

namespace sirtaki::detail {

// The tensors of the state, of which some may be undefined. Nothing for classes that are not
// LibTorch's.
std::optional<std::vector<at::Tensor*>> TensorsOfState(torch::optim::OptimizerParamState& state);

// A copy that shares no tensors with it, of LibTorch's classes; others have what their clone() gives.
std::unique_ptr<torch::optim::OptimizerParamState> CopyOfState(
    const torch::optim::OptimizerParamState& state);

// Moves the state of each parameter that is not on the CPU to the parameter's device, by what is
// known of LibTorch's optimizers, and by the state's own serialize() for others. Throws
// std::runtime_error if a state has none.
void PutStateOnDevices(torch::optim::Optimizer& optimizer);

}  // namespace sirtaki::detail
