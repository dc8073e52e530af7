// The parameters of an optimizer and what they are called.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "sirtaki/optimizer.h"

namespace torch::nn {
class Module;
}

namespace sirtaki::detail {

// The parameters of a module, and behind them its buffers, each as "buffer NAME".
NamedTensors TensorsOf(const torch::nn::Module& module);

// Parameters stand in the order of the optimizer's groups; a tensor that stands in several places
// counts once.
struct NamedParameters {
  std::vector<std::string> names;
  std::vector<at::Tensor> parameters;
  std::string error;  // what is wrong with them on this rank; then the lists are not complete
};

// An error: a name that is given twice, a parameter that has none.
NamedParameters MatchNames(const torch::optim::Optimizer& optimizer,
                           const NamedTensors& named_tensors);

// Names those that nobody has named "added parameter 1", …, by their order in the optimizer.
void NameAdded(const torch::optim::Optimizer& optimizer, NamedTensors* names);

// `"fc.weight" float32 [3, 4]` and so on, for comparing them between ranks.
std::vector<std::string> DescribeAll(const NamedParameters& named);

}  // namespace sirtaki::detail
