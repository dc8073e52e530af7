// The state of an unsplit model, and of its optimizer, is put together of what the ranks of a pipeline
// have, and taken apart. It has the form that LibTorch saves it in.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <chrono>
#include <string>
#include <vector>

#include "frameworks/torch/session/session_set.h"
#include "sirtaki/detail/gradient_reducer.h"

namespace sirtaki::detail {

// A StateCall is a call of all ranks of a row.
struct StateCall {
  std::string what;  // for texts
  const SessionSet& row;
  std::chrono::milliseconds timeout;
};

// `root_rank`: the only rank of the job whose archive is written; -1: each rank's is. What throws on one
// rank throws on all, and leaves the archive as it may be.

// Saves what torch::save() of the unsplit model would. `module`: has this rank's layers of it, under
// the names that they have there.
void SaveFullModel(const StateCall& call, const torch::nn::Module& module, int root_rank,
                   torch::serialize::OutputArchive& archive);
// Overwrites the layers of the module. Not collective.
void LoadFullModel(torch::nn::Module& module, torch::serialize::InputArchive& archive);

// Saves what torch::save() of the unsplit model's optimizer would, if that has the same groups, with
// their parameters in the order of the model. `parameters`: those of this rank, "N.rest", where N is
// the number of a layer. Of an optimizer in shards it is a call of all copies of the pipeline.
void SaveFullOptimizer(const StateCall& call, const NamedTensors& parameters,
                       torch::optim::Optimizer& optimizer, int root_rank,
                       torch::serialize::OutputArchive& archive);
// Overwrites the state of this rank's parameters, and the options. `ties`: names that are one in the
// model. If it throws the optimizer is what it was.
void LoadFullOptimizer(const StateCall& call, const NamedTensors& parameters,
                       const std::vector<std::vector<std::string>>& ties,
                       torch::optim::Optimizer& optimizer, torch::serialize::InputArchive& archive);

}  // namespace sirtaki::detail
