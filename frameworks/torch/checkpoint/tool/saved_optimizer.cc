#include "frameworks/torch/checkpoint/tool/saved_optimizer.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <map>
#include <stdexcept>

#include "frameworks/torch/checkpoint/checkpoint_reading.h"
#include "frameworks/torch/checkpoint/tool/python_file.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/state/optimizer_device.h"

namespace sirtaki::detail {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// What a state or options of LibTorch's write of themselves.
template <class Part>
Items SavedItems(const Part& part) {
  OutputArchive saved;
  part.serialize(saved);
  const std::string bytes = BytesOf(saved);
  InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  return ItemsOf(archive);
}

constexpr const char* kItsProgram = "only load_checkpoint() in its program can read it";

struct Class {
  std::function<std::unique_ptr<Optimizer>(std::vector<OptimizerParamGroup>)> make;
  std::function<std::unique_ptr<torch::optim::OptimizerOptions>()> options;
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> state;
};

template <class One, class Options, class State>
Class ClassOf() {
  return {[](auto groups) { return std::make_unique<One>(std::move(groups), Options(0.1)); },
          [] { return std::make_unique<Options>(0.1); }, [] { return std::make_unique<State>(); }};
}

// By the class of the options.
const std::map<std::string, Class>& Classes() {
  using namespace torch::optim;
  static const std::map<std::string, Class> classes = {
      {"torch::optim::SGDOptions", ClassOf<SGD, SGDOptions, SGDParamState>()},
      {"torch::optim::AdamOptions", ClassOf<Adam, AdamOptions, AdamParamState>()},
      {"torch::optim::AdamWOptions", ClassOf<AdamW, AdamWOptions, AdamWParamState>()},
      {"torch::optim::RMSpropOptions", ClassOf<RMSprop, RMSpropOptions, RMSpropParamState>()},
      {"torch::optim::AdagradOptions", ClassOf<Adagrad, AdagradOptions, AdagradParamState>()}};
  return classes;
}

}  // namespace

Items ItemsOf(InputArchive& archive) {
  Items items;
  for (const std::string& key : archive.keys()) {
    items.emplace_back(key, Read<c10::IValue>(archive, key));
  }
  return items;
}

void SavedOptimizer::Make(const std::vector<std::vector<std::int64_t>>& strides) {
  const Class* of = nullptr;
  std::vector<OptimizerParamGroup> groups;
  std::size_t place = 0;
  for (const std::string& line : lines_) {
    if (const auto sizes = SizesInLine(line)) {
      // Nobody touches its memory.
      groups.back().params().push_back(
          strides.empty() ? at::empty(*sizes) : at::empty_strided(*sizes, strides.at(place++)));
      continue;
    }
    const auto found = Classes().find(line.substr(line.find(" with ") + 6));
    if (found == Classes().end() || (of != nullptr && of != &found->second)) {
      throw std::runtime_error("it is none of LibTorch's SGD, Adam, AdamW, RMSprop and Adagrad: " +
                               std::string(kItsProgram));
    }
    of = &found->second;
    groups.emplace_back(std::vector<at::Tensor>(), of->options());
  }
  if (of == nullptr) throw std::runtime_error("it has no groups of parameters");
  const auto state = of->state();
  const auto tensors = TensorsOfState(*state).value();
  for (at::Tensor* const tensor : tensors)
    *tensor = at::zeros({1});  // undefined ones are not saved
  for (const auto& [name, value] : SavedItems(*state)) names_.insert(name);
  optimizer_ = of->make(std::move(groups));
}

void SavedOptimizer::CheckStates(InputArchive& archive) const {
  InputArchive own = ReadNested(archive, "optimizer", "optimizer");
  InputArchive states;
  bool is_known = own.try_read("state", states);
  for (const std::string& key : is_known ? states.keys() : std::vector<std::string>()) {
    InputArchive state = ReadNested(states, key, "state");
    for (const std::string& name : state.keys()) is_known = is_known && names_.contains(name);
  }
  if (is_known) return;
  throw std::runtime_error("the optimizer's save() does not write what LibTorch's classes write: " +
                           std::string(kItsProgram));
}

void SavedOptimizer::CheckNeedsNoStrides(InputArchive& archive) const {
  ShardCover cover(lines_);
  const auto ranges = cover.RangesOf(archive);
  for (std::size_t place = 0; place < ranges.size(); ++place) {
    const std::vector<std::int64_t> sizes = SizesInLine(cover.line(place)).value();
    const std::int64_t count = ranges[place].count;
    if (sizes.size() < 2 || count == 0 || count == c10::multiply_integers(sizes)) continue;
    throw std::runtime_error(cover.line(place) +
                             ": its shards are of an earlier version of the library, which did not "
                             "save how it lies in memory; load the checkpoint with its program and "
                             "save it again");
  }
}

void SavedOptimizer::Load(InputArchive& archive) {
  Make({});
  CheckStates(archive);
  LoadOptimizer(*optimizer_, archive);
}

void SavedOptimizer::Add(InputArchive& archive) {
  const std::vector<std::vector<std::int64_t>> strides = SavedStrides(archive);
  if (!shards_) {
    Make(strides);
    shards_ = std::make_unique<ShardsOfAllRanks>(*optimizer_);
  }
  CheckStates(archive);
  if (strides.empty()) CheckNeedsNoStrides(archive);
  shards_->Add(archive);
}

void SavedOptimizer::Finish() {
  if (!shards_) throw std::runtime_error("no file has shards of it");
  shards_->Finish();
}

void SavedOptimizer::Write(OutputArchive& archive) { SaveOptimizer(*optimizer_, archive); }

c10::IValue SavedOptimizer::StateDict() const {
  c10::impl::GenericDict states = AnyDict();
  c10::impl::GenericList groups(c10::AnyType::get());
  std::int64_t place = 0;
  for (const OptimizerParamGroup& group : optimizer_->param_groups()) {
    c10::impl::GenericList places(c10::AnyType::get());
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer_->state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer_->state().end() && found->second) {
        c10::impl::GenericDict state = AnyDict();
        for (const auto& [name, value] : SavedItems(*found->second)) {
          // Python counts steps in a float32.
          state.insert(name, value.isInt()
                                 ? at::scalar_tensor(static_cast<double>(value.toInt()), at::kFloat)
                                 : value);
        }
        states.insert(place, state);
      }
      places.push_back(place++);
    }
    c10::impl::GenericDict of_group = AnyDict();
    for (const auto& [name, value] : SavedItems(group.options())) of_group.insert(name, value);
    of_group.insert("params", places);
    groups.push_back(of_group);
  }
  c10::impl::GenericDict dict = AnyDict();
  dict.insert("state", states);
  dict.insert("param_groups", groups);
  return dict;
}

}  // namespace sirtaki::detail
