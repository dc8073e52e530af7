// An optimizer's own save and load, with what LibTorch's lack.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace sirtaki::detail {

// BytesOf returns the bytes of the archive, as a file has them. `expected`: how many bytes there may be.
std::string BytesOf(torch::serialize::OutputArchive& archive, std::size_t expected = 0);

// ParametersOf returns the parameters of all groups, in their order.
std::vector<at::Tensor> ParametersOf(const torch::optim::Optimizer& optimizer);
// DistinctParametersOf returns the same, but each parameter once: in C++ a module gives one that it has
// under two names (tied weights) twice.
std::vector<at::Tensor> DistinctParametersOf(const torch::optim::Optimizer& optimizer);

// Describes the optimizer by position, as LibTorch's optimizers save their state: a line a group
// and a parameter. The type of the options tells which optimizer it is, wrapped or not.
// `more`: what a parameter's line ends with, for lists that ranks compare.
using DescribeParameter = std::function<std::string(const at::Tensor& parameter)>;
std::vector<std::string> DescribeOptimizer(const torch::optim::Optimizer& optimizer,
                                           const DescribeParameter& more = nullptr);

// State and options of the optimizer, by its own save(). It is left as it was; not const because
// something is put aside meanwhile. Throws what save() throws.
void SaveOptimizer(torch::optim::Optimizer& optimizer, torch::serialize::OutputArchive& archive);

// Replaces the optimizer's state and options by those of an archive from SaveOptimizer, mapped by
// the position of the parameters, by its own load(), and puts each parameter's state onto the
// parameter's device. Precondition: the archive was read to the CPU. Throws what load() throws, and
// std::runtime_error if load() did not bring all state that was saved, or if that cannot be moved;
// what the optimizer then has is undefined.
void LoadOptimizer(torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

}  // namespace sirtaki::detail
