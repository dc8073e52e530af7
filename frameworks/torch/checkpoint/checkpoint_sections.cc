#include "frameworks/torch/checkpoint/checkpoint_sections.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <memory>
#include <set>
#include <stdexcept>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>

#include "core/base/log.h"
#include "core/base/text.h"
#include "frameworks/torch/checkpoint/checkpoint_generators.h"
#include "frameworks/torch/checkpoint/checkpoint_reading.h"
#include "frameworks/torch/checkpoint/checkpoint_shards.h"
#include "frameworks/torch/checkpoint/scheduler_position.h"
#include "frameworks/torch/state/optimizer_archive.h"
#include "frameworks/torch/state/sharded_state.h"
#include "frameworks/torch/state/tensor_split.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {
namespace {

using core::Quoted;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

template <class T>
using Dict = c10::Dict<std::string, T>;
using Tensors = Dict<at::Tensor>;
using Names = c10::List<std::string>;

// ---- reading, with texts that name what is missing ----

template <class T>
T Find(const Dict<T>& dict, const std::string& name, const std::string& kind) {
  const auto found = dict.find(name);
  if (found == dict.end()) throw std::runtime_error("it has no " + kind + " " + Quoted(name));
  return found->value();
}

std::string IndexOf(const Names& names, const std::string& name, const std::string& kind) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (std::string(names[i]) == name) return std::to_string(i);
  }
  throw std::runtime_error("it has no " + kind + " " + Quoted(name));
}

// ---- models ----

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

template <class List>
std::vector<NamedTensor> Defined(const List& list) {
  std::vector<NamedTensor> tensors;
  for (const auto& item : list) {
    if (item.value().defined()) tensors.push_back({item.key(), item.value()});
  }
  return tensors;
}

std::vector<NamedTensor> ParametersOf(const torch::nn::Module& model) {
  return Defined(model.named_parameters());
}
std::vector<NamedTensor> BuffersOf(const torch::nn::Module& model) {
  return Defined(model.named_buffers());
}

Tensors DictOf(const std::vector<NamedTensor>& tensors) {
  Tensors dict;
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor.detach());
  return dict;
}

std::string OfModel(const std::string& model) { return "model " + Quoted(model) + ": "; }

// Throws on the first difference between what is saved and what there is.
void CheckTensors(const std::string& model, const std::string& kind, const Tensors& saved,
                  const std::vector<NamedTensor>& present) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : present) {
    names.insert(name);
    const auto found = saved.find(name);
    const std::string what = OfModel(model) + kind + " " + Quoted(name);
    if (found == saved.end()) throw std::runtime_error(what + " is not in the file");
    const at::Tensor of_file = found->value();
    if (TypeAndShape(of_file) != TypeAndShape(tensor)) {
      throw std::runtime_error(what + " is " + TypeAndShape(of_file) + " in the file and " +
                               TypeAndShape(tensor) + " here");
    }
  }
  for (const auto& item : saved) {
    if (names.count(item.key()) == 0) {
      throw std::runtime_error(OfModel(model) + "the file has a " + kind + " " +
                               Quoted(item.key()) + ", which the model does not have");
    }
  }
}

// ---- optimizers ----

void CheckOptimizer(const std::string& name, const Names& saved,
                    const std::vector<std::string>& present) {
  const std::string nothing = "nothing more";
  for (std::size_t i = 0; i < std::max<std::size_t>(saved.size(), present.size()); ++i) {
    const std::string of_file = i < saved.size() ? std::string(saved[i]) : nothing;
    const std::string here = i < present.size() ? present[i] : nothing;
    if (of_file != here) {
      throw std::runtime_error("optimizer " + Quoted(name) + ": " + of_file + " in the file, " +
                               here + " here");
    }
  }
}

// ---- small parts ----

struct ValueDicts {
  Dict<std::int64_t> integers;
  Dict<double> numbers;
  Dict<std::string> texts;
  Tensors tensors;

  void Put(const std::string& name, const std::int64_t* value) { integers.insert(name, *value); }
  void Put(const std::string& name, const double* value) { numbers.insert(name, *value); }
  void Put(const std::string& name, const std::string* value) { texts.insert(name, *value); }
  void Put(const std::string& name, const at::Tensor* value) {
    if (!value->defined()) throw std::runtime_error("the tensor " + Quoted(name) + " is undefined");
    tensors.insert(name, value->detach());
  }
  std::int64_t Get(const std::string& name, const std::int64_t* /*old*/) const {
    return Find(integers, name, "whole number");
  }
  double Get(const std::string& name, const double* /*old*/) const {
    return Find(numbers, name, "number");
  }
  std::string Get(const std::string& name, const std::string* /*old*/) const {
    return Find(texts, name, "text");
  }
  at::Tensor Get(const std::string& name, const at::Tensor* old) const {
    const at::Tensor found = Find(tensors, name, "tensor");
    const at::Device device = old->defined() ? old->device() : at::Device(at::kCPU);
    return found.to(device, found.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
        .set_requires_grad(old->defined() && old->requires_grad());
  }
};

// Throws the text of the exception that is being handled, with the object that has thrown it.
[[noreturn]] void Blame(const NamedPart<ArchivedObject>& object) {
  throw std::runtime_error("object " + Quoted(object.name) + ": " + TextOfCurrent());
}

void SaveObject(const NamedPart<ArchivedObject>& object, OutputArchive& archive) {
  try {
    object.part.save(archive);
  } catch (...) {
    Blame(object);
  }
}

SchedulerPosition PositionOfAny(
    const decltype(CheckpointParts::schedulers)::value_type& scheduler) {
  return std::visit([](auto* one) { return PositionOf(*one); }, scheduler.part);
}

template <class Part>
std::string FirstDouble(const std::vector<NamedPart<Part>>& list, const char* kind) {
  std::set<std::string> names;
  for (const auto& one : list) {
    if (!names.insert(one.name).second) {
      return std::string("two ") + kind + " are called " + Quoted(one.name);
    }
  }
  return {};
}

}  // namespace

std::string WhyNoCheckpoint(const CheckpointParts& parts) {
  const auto generators = GeneratorsOf(parts);
  for (const std::string& text :
       {FirstDouble(parts.models, "models"), FirstDouble(parts.optimizers, "optimizers"),
        FirstDouble(parts.schedulers, "schedulers"), FirstDouble(parts.values, "values"),
        FirstDouble(parts.objects, "objects"), FirstDouble(generators, "generators")}) {
    if (!text.empty()) return text;
  }
  for (const auto& [name, generator] : generators) {
    if (!generator.defined()) return "the generator " + Quoted(name) + " is undefined";
  }
  return {};
}

std::vector<std::string> DescribeParts(const CheckpointParts& parts) {
  std::vector<std::string> lines;
  for (const auto& [name, model] : parts.models) {
    for (const auto& [key, tensor] : ParametersOf(*model)) {
      lines.push_back(OfModel(name) + "parameter " + Quoted(key) + " " + TypeAndShape(tensor) +
                      PlaceText(tensor));
    }
    for (const auto& [key, tensor] : BuffersOf(*model)) {
      lines.push_back(OfModel(name) + "buffer " + Quoted(key) + " " + TypeAndShape(tensor));
    }
  }
  for (const auto& [name, optimizer] : parts.optimizers) {
    const torch::optim::Optimizer& one = *optimizer;
    // The class of the optimizer and whose stages and parts it has are compared between the ranks, as
    // broadcast_optimizer_state does, not with the file.
    lines.push_back("optimizer " + Quoted(name) + ", " + c10::demangle(typeid(one).name()));
    for (const std::string& line : DescribeOptimizer(one, &PlaceText)) {
      lines.push_back("optimizer " + Quoted(name) + ": " + line);
    }
  }
  for (const auto& [name, scheduler] : parts.schedulers) {
    lines.push_back((scheduler.index() == 0 ? "scheduler " : "plateau scheduler ") + Quoted(name));
  }
  static constexpr const char* kValueKinds[] = {"whole number ", "number ", "text ", "tensor "};
  for (const auto& [name, value] : parts.values) {
    lines.push_back(kValueKinds[value.index()] + Quoted(name));
  }
  for (const auto& one : parts.objects) lines.push_back("object " + Quoted(one.name));
  const auto generators = GeneratorsOf(parts);
  // The first is there on all ranks.
  for (std::size_t i = 1; i < generators.size(); ++i) {
    lines.push_back("generator " + Quoted(generators[i].name));
  }
  return lines;
}

namespace {

void WriteModels(const CheckpointParts& parts, OutputArchive& archive) {
  Dict<Tensors> parameters;
  Dict<Tensors> buffers;
  for (const auto& [name, model] : parts.models) {
    parameters.insert(name, DictOf(ParametersOf(*model)));
    buffers.insert(name, DictOf(BuffersOf(*model)));
  }
  archive.write("model_parameters", c10::IValue(parameters));
  archive.write("model_buffers", c10::IValue(buffers));
}

void WriteOptimizers(const CheckpointParts& parts, OutputArchive& archive) {
  Names names;
  Dict<Names> descriptions;
  OutputArchive all(archive.compilation_unit());
  for (const auto& [name, optimizer] : parts.optimizers) {
    if (ShardedOf(*optimizer) == nullptr) {
      OutputArchive one(archive.compilation_unit());
      SaveOptimizer(*optimizer, one);
      all.write(std::to_string(names.size()), one);
    }
    names.push_back(name);
    descriptions.insert(name, Names());
    for (const std::string& line : DescribeOptimizer(*optimizer)) {
      descriptions.at(name).push_back(line);
    }
  }
  archive.write("optimizer_names", c10::IValue(names));
  archive.write("optimizer_parameters", c10::IValue(descriptions));
  archive.write("optimizers", all);
}

void WriteObjects(const CheckpointParts& parts, OutputArchive& archive) {
  Names names;
  OutputArchive objects(archive.compilation_unit());
  for (const auto& object : parts.objects) {
    OutputArchive one(archive.compilation_unit());
    SaveObject(object, one);
    objects.write(std::to_string(names.size()), one);
    names.push_back(object.name);
  }
  archive.write("object_names", c10::IValue(names));
  archive.write("objects", objects);
}

void WriteSmallParts(const CheckpointParts& parts, const std::vector<at::Tensor>& generator_states,
                     OutputArchive& archive) {
  Dict<Dict<double>> schedulers;
  for (const auto& scheduler : parts.schedulers) {
    Dict<double> position;
    for (const auto& [member, number] : PositionOfAny(scheduler)) position.insert(member, number);
    schedulers.insert(scheduler.name, position);
  }
  archive.write("schedulers", c10::IValue(schedulers));

  ValueDicts values;
  for (const auto& [name, value] : parts.values) {
    std::visit([&values, &key = name](const auto* one) { values.Put(key, one); }, value);
  }
  archive.write("integers", c10::IValue(values.integers));
  archive.write("numbers", c10::IValue(values.numbers));
  archive.write("texts", c10::IValue(values.texts));
  archive.write("tensors", c10::IValue(values.tensors));

  WriteObjects(parts, archive);

  const auto generators = GeneratorsOf(parts);
  Tensors states;
  for (std::size_t i = 0; i < generators.size(); ++i) {
    states.insert(generators[i].name, generator_states[i]);
  }
  archive.write("generators", c10::IValue(states));
}

}  // namespace

void WriteParts(int ranks, const CheckpointParts& parts,
                const std::vector<at::Tensor>& generator_states,
                const std::vector<std::string>& shards, OutputArchive& archive) {
  archive.write("format", c10::IValue(shards.empty() ? kFormat : kFormatOfShards));
  if (!shards.empty()) archive.write("shards", c10::IValue(shards));
  archive.write("ranks", c10::IValue(static_cast<std::int64_t>(ranks)));
  WriteModels(parts, archive);
  WriteOptimizers(parts, archive);
  WriteSmallParts(parts, generator_states, archive);
}

LoadedParts::LoadedParts(const CheckpointParts& parts, const Reader& reader)
    : parts_(parts), reader_(reader) {}

LoadedParts::~LoadedParts() {
  for (auto undo = undo_.rbegin(); undo != undo_.rend(); ++undo) {
    try {
      (*undo)();
    } catch (...) {
      SIRTAKI_LOG(kError, "load_checkpoint: cannot restore the earlier state: " << TextOfCurrent());
    }
  }
}

std::string LoadedParts::ReadAll(InputArchive& archive) {
  ReadFormat(archive);
  writers_ = static_cast<int>(Read<std::int64_t>(archive, "ranks"));
  ReadModels(archive);
  ReadOptimizers(archive);
  ReadSmallParts(archive);
  OutputArchive others;
  for (const char* key : {"schedulers", "integers", "numbers", "texts", "tensors", "generators"}) {
    others.write(key, Read<c10::IValue>(archive, key));
  }
  WriteObjects(parts_, others);
  others.write("shards", c10::IValue(shards_));
  others.write("keys_in_shards", c10::IValue(keys_in_shards_));
  return BytesOf(others);
}

void LoadedParts::ReadBytes(const std::string& bytes) {
  InputArchive archive;
  archive.load_from(bytes.data(), bytes.size(), c10::kCPU);
  ReadSmallParts(archive);
  shards_ = Read<std::vector<std::string>>(archive, "shards");
  keys_in_shards_ = Read<std::vector<std::string>>(archive, "keys_in_shards");
}

void LoadedParts::Apply() {
  undo_.clear();
  const at::NoGradGuard no_grad;
  for (const auto& apply : apply_) apply();
}

void LoadedParts::ReadModels(InputArchive& archive) {
  const auto parameters = Read<Dict<Tensors>>(archive, "model_parameters");
  const auto buffers = Read<Dict<Tensors>>(archive, "model_buffers");
  const auto read = [this](const std::string& model, const char* kind, const Tensors& saved,
                           const std::vector<NamedTensor>& present) {
    CheckTensors(model, kind, saved, present);
    for (const auto& [name, tensor] : present) {
      apply_.emplace_back([from = saved.at(name), to = tensor] { to.copy_(from); });
    }
  };
  for (const auto& [name, model] : parts_.models) {
    read(name, "parameter", Find(parameters, name, "model"), ParametersOf(*model));
    read(name, "buffer", Find(buffers, name, "model"), BuffersOf(*model));
  }
}

void LoadedParts::ReadOptimizers(InputArchive& archive) {
  if (parts_.optimizers.empty()) return;
  const auto names = Read<Names>(archive, "optimizer_names");
  const auto descriptions = Read<Dict<Names>>(archive, "optimizer_parameters");
  InputArchive all = ReadNested(archive, "optimizers", "optimizers");
  const std::vector<std::string> files = NamesOfShards(archive);
  for (const auto& [name, optimizer] : parts_.optimizers) {
    const std::string key = IndexOf(names, name, "optimizer");
    CheckOptimizer(name, Find(descriptions, name, "optimizer"), DescribeOptimizer(*optimizer));
    std::string& key_in_shards = keys_in_shards_.emplace_back();
    InputArchive one;
    if (all.try_read(key, one)) {
      undo_.push_back(SetAside(*optimizer));
      LoadOptimizer(*optimizer, one);
    } else if (!files.empty()) {
      key_in_shards = key;
      shards_ = files;
    } else {
      throw std::runtime_error("it has no optimizer " + Quoted(name));
    }
  }
}

void LoadedParts::ReadSmallParts(InputArchive& archive) {
  ReadSchedulers(archive);
  ReadValues(archive);
  ReadObjects(archive);
  ReadGenerators(archive);
}

void LoadedParts::ReadSchedulers(InputArchive& archive) {
  const auto schedulers = Read<Dict<Dict<double>>>(archive, "schedulers");
  for (const auto& scheduler : parts_.schedulers) {
    SchedulerPosition position;
    for (const auto& item : Find(schedulers, scheduler.name, "scheduler")) {
      position[item.key()] = item.value();
    }
    for (const auto& [member, number] : PositionOfAny(scheduler)) {
      if (position.contains(member)) continue;
      throw std::runtime_error("scheduler " + Quoted(scheduler.name) +
                               " is of another kind: it has no \"" + member + "\"");
    }
    apply_.emplace_back([&scheduler, position] {
      std::visit([&position](auto* one) { SetPosition(*one, position); }, scheduler.part);
    });
  }
}

void LoadedParts::ReadValues(InputArchive& archive) {
  const ValueDicts values = {
      Read<Dict<std::int64_t>>(archive, "integers"), Read<Dict<double>>(archive, "numbers"),
      Read<Dict<std::string>>(archive, "texts"), Read<Tensors>(archive, "tensors")};
  for (const auto& value : parts_.values) {
    const auto read = [&](auto* one) {
      apply_.emplace_back([one, next = values.Get(value.name, one)] { *one = next; });
    };
    std::visit(read, value.part);
  }
}

void LoadedParts::ReadObjects(InputArchive& archive) {
  const auto names = Read<Names>(archive, "object_names");
  for (const auto& object : parts_.objects) {
    const std::string key = IndexOf(names, object.name, "object");
    InputArchive all = ReadNested(archive, "objects", "objects");
    InputArchive one = ReadNested(all, key, "object " + Quoted(object.name));
    OutputArchive present;
    SaveObject(object, present);
    undo_.emplace_back([&object, bytes = BytesOf(present)] {
      InputArchive before;
      before.load_from(bytes.data(), bytes.size());
      object.part.load(before);
    });
    try {
      object.part.load(one);
    } catch (...) {
      Blame(object);
    }
  }
}

void LoadedParts::ReadGenerators(InputArchive& archive) {
  const auto states = Read<Tensors>(archive, "generators");
  for (const auto& [name, generator] : GeneratorsOf(parts_)) {
    // A run that is on GPUs now may have been on the CPU.
    if (IsGpuGenerator(name) && !states.contains(name)) continue;
    const at::Tensor next = NextState(generator, Find(states, name, "generator"), reader_);
    apply_.emplace_back([to = generator, next] { SetStateOfGenerator(to, next); });
  }
}

}  // namespace sirtaki::detail
