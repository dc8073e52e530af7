// Where an optimizer's state lies.
#pragma once

#include <torch/optim/optimizer.h>

namespace sirtaki::detail {

// Moves the state of each parameter that is not on the CPU to the parameter's device, by what is
// known of LibTorch's optimizers, and by the state's own serialize() for others. Throws
// std::runtime_error if a state has none.
void PutStateOnDevices(torch::optim::Optimizer& optimizer);

}  // namespace sirtaki::detail
