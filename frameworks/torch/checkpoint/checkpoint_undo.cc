#include "frameworks/torch/checkpoint/checkpoint_undo.h"

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "core/base/log.h"
#include "frameworks/torch/checkpoint/checkpoint_sections.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

struct OptimizerUndo::Before {
  torch::optim::Optimizer* optimizer;
  std::remove_reference_t<decltype(optimizer->state())> state;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
};

OptimizerUndo::OptimizerUndo(const CheckpointParts& parts) {
  before_.reserve(parts.optimizers.size());
  for (const auto& named : parts.optimizers) {
    Before before{named.part, {}, {}};
    for (const auto& group : named.part->param_groups()) {
      before.options.push_back(group.options().clone());
    }
    before_.push_back(std::move(before));
  }
  for (Before& before : before_) before.state.swap(before.optimizer->state());
}

OptimizerUndo::~OptimizerUndo() {
  // Backwards: one that stands there twice gave its state to its first place.
  for (auto before = before_.rbegin(); before != before_.rend(); ++before) {
    before->state.swap(before->optimizer->state());
    for (std::size_t g = 0; g < before->options.size(); ++g) {
      before->optimizer->param_groups()[g].set_options(std::move(before->options[g]));
    }
  }
}

void OptimizerUndo::Keep() { before_.clear(); }

SmallPartsUndo::SmallPartsUndo(const CheckpointParts& parts) : parts_(&parts) {
  for (const auto& one : parts.schedulers) schedulers_.push_back(PositionOfAny(one));
  for (const auto& one : parts.values) {
    std::visit([this](const auto* value) { values_.emplace_back(*value); }, one.part);
  }
  for (const auto& one : parts.objects) {
    OutputArchive archive;
    SaveObject(one, archive);
    objects_.push_back(ToBytes(archive));
  }
  for (const auto& one : GeneratorsOf(parts)) {
    generator_states_.push_back(StateOfGenerator(one.part));
  }
}

SmallPartsUndo::~SmallPartsUndo() {
  if (!parts_) return;
  try {
    Restore();
  } catch (...) {
    SIRTAKI_LOG(kError, "load_checkpoint: cannot restore the earlier state: " << TextOfCurrent());
  }
}

void SmallPartsUndo::Restore() const {
  for (std::size_t i = 0; i < schedulers_.size(); ++i) {
    std::visit([&](auto* one) { SetPosition(*one, schedulers_[i]); }, parts_->schedulers[i].part);
  }
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const auto put_back = [&](auto* value) {
      *value = std::get<std::remove_pointer_t<decltype(value)>>(values_[i]);
    };
    std::visit(put_back, parts_->values[i].part);
  }
  const auto generators = GeneratorsOf(*parts_);
  for (std::size_t i = 0; i < generators.size(); ++i) {
    at::Generator generator = generators[i].part;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(generator_states_[i]);
  }
  for (std::size_t i = 0; i < objects_.size(); ++i) {
    InputArchive archive;
    archive.load_from(objects_[i].data(), objects_[i].size());
    parts_->objects[i].part.load(archive);
  }
}

}  // namespace sirtaki::detail
