// These functions give all ranks the same start: the model's tensors and the optimizer's state of
// one rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <string>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/process_set.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace sirtaki {

// Overwrites the parameters and buffers of the module with those of `root_rank`. Collective. Names,
// shapes and types are compared first; if they differ, every rank throws Mismatch, which names the
// first difference, and nothing is changed.
SIRTAKI_API void broadcast_parameters(const torch::nn::Module& module, int root_rank,
                                      const ProcessSet& process_set = {});

// Does the same for named tensors, for instance model->named_parameters().
SIRTAKI_API void broadcast_parameters(const torch::OrderedDict<std::string, at::Tensor>& tensors,
                                      int root_rank, const ProcessSet& process_set = {});

// Does the same for tensors that are matched by their position.
SIRTAKI_API void broadcast_parameters(const std::vector<at::Tensor>& tensors, int root_rank,
                                      const ProcessSet& process_set = {});

// Gives every rank the optimizer state of `root_rank` (momentum, moments, step counts, LBFGS's
// history) and its options per group (learning rates too), matched by the position of the
// parameters: training then goes on everywhere as it would on the root, bit for bit. State that
// only the root has is created on the others, state that only they have is dropped.
//
// The optimizer needs its own save() and load(): LibTorch's optimizers have them, a subclass of
// yours that keeps state must add them. All ranks throw InvalidArgument if load() does not restore
// all of the root's state. All throw Mismatch, and nothing is changed, if the optimizers differ in
// type, groups or parameters. If loading fails on one rank, all throw, and the state of all ranks
// except the root is undefined. Collective, one at a time. No rank needs a second copy of the
// state.
SIRTAKI_API void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank,
                                           const ProcessSet& process_set = {});

}  // namespace sirtaki
