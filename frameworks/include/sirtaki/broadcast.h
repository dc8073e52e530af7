// Giving all ranks the same start: the model's tensors and the optimizer's state of one rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <string>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/participants.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace sirtaki {

// Overwrites the parameters and buffers of the module with those of `root_rank`. Collective.
// Names, shapes and types are compared first; if they differ, every rank throws mismatch, naming
// the first difference, and nothing is changed.
SIRTAKI_API void broadcast_parameters(const torch::nn::Module& module, int root_rank,
                                      const Participants& among = {});

// The same for named tensors, for instance model->named_parameters().
SIRTAKI_API void broadcast_parameters(const torch::OrderedDict<std::string, at::Tensor>& tensors,
                                      int root_rank, const Participants& among = {});

// The same for tensors that are told apart by their position.
SIRTAKI_API void broadcast_parameters(const std::vector<at::Tensor>& tensors, int root_rank,
                                      const Participants& among = {});

// Gives every rank the optimizer state of `root_rank` (momentum, moments, step counts, LBFGS's
// history) and its options per group (learning rates too), mapped by the position of the
// parameters: training then goes on everywhere as it would on the root, bit for bit. State that
// only the root has is created on the others, state that only they have is dropped.
//
// Works for all optimizers that have their own save() and load(): LibTorch's have, a subclass of
// your own that keeps state has to; invalid_argument on all ranks if what it loads is not all of
// the root's. Optimizers of different types, groups or parameters are refused as mismatch, and
// nothing is changed; if loading fails on one rank, all throw, and the state of all but the root is
// undefined. Collective, one at a time. Needs no second copy of the state on any rank.
SIRTAKI_API void broadcast_optimizer_state(torch::optim::Optimizer& optimizer, int root_rank,
                                           const Participants& among = {});

}  // namespace sirtaki
