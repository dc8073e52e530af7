// The parts of an elastic::State are made here: each copies, broadcasts and makes anew a model, an
// optimizer, or what an archive saves.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/base/status.h"
#include "sirtaki/detail/elastic_parts.h"

namespace sirtaki::elastic {

[[noreturn]] void RefuseState(core::StatusCode code, const std::string& text);

using Tensors = std::unordered_set<const c10::TensorImpl*>;

// A part of an archive is copied as the bytes that it is saved in.
using Save = std::function<void(torch::serialize::OutputArchive&)>;
using Load = std::function<void(torch::serialize::InputArchive&)>;
detail::ElasticPart PartOfArchive(const char* kind, const std::string& name, const Save& save,
                                  const Load& load);
detail::ElasticPart PartOfScheduler(const std::string& name, torch::optim::LRScheduler& scheduler);
detail::ElasticPart PartOfScheduler(const std::string& name,
                                    torch::optim::ReduceLROnPlateauScheduler& scheduler);
// `not_in_steps`: the parameters that a step() does not copy, then. Errors: kUnsupported, if it has a
// DistributedDataParallel that cannot be made again for other ranks.
detail::ElasticPart PartOfModel(const std::string& name, torch::nn::Module& module,
                                const Tensors* not_in_steps);
// Errors: kUnsupported likewise.
detail::ElasticPart PartOfOptimizer(const std::string& name, torch::optim::Optimizer& optimizer);

}  // namespace sirtaki::elastic
