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
#include <set>
#include <sstream>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/checkpoint/checkpoint_generators.h"
#include "frameworks/torch/state/optimizer_archive.h"
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

constexpr std::int64_t kFormat = 1;

// ---- reading, with texts that name what is missing ----

template <class T>
T Read(InputArchive& archive, const std::string& key) {
  c10::IValue value;
  if (!archive.try_read(key, value)) throw std::runtime_error("it has no " + key);
  return value.to<T>();
}

InputArchive ReadNested(InputArchive& archive, const std::string& key, const std::string& what) {
  InputArchive nested;
  if (!archive.try_read(key, nested)) throw std::runtime_error("it has no " + what);
  return nested;
}

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
  void Get(const std::string& name, std::int64_t* value) const {
    *value = Find(integers, name, "whole number");
  }
  void Get(const std::string& name, double* value) const { *value = Find(numbers, name, "number"); }
  void Get(const std::string& name, std::string* value) const {
    *value = Find(texts, name, "text");
  }
  void Get(const std::string& name, at::Tensor* value) const {
    const at::Tensor found = Find(tensors, name, "tensor");
    const at::Device device = value->defined() ? value->device() : at::Device(at::kCPU);
    *value = found.to(device, found.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
                 .set_requires_grad(value->defined() && value->requires_grad());
  }
};

// Their own exceptions, told whose they are.
[[noreturn]] void Blame(const NamedPart<ArchivedObject>& object) {
  throw std::runtime_error("object " + Quoted(object.name) + ": " + TextOfCurrent());
}

void LoadObject(const NamedPart<ArchivedObject>& object, InputArchive& archive) {
  try {
    object.part.load(archive);
  } catch (...) {
    Blame(object);
  }
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

SchedulerPosition PositionOfAny(
    const decltype(CheckpointParts::schedulers)::value_type& scheduler) {
  return std::visit([](auto* one) { return PositionOf(*one); }, scheduler.part);
}

void SaveObject(const NamedPart<ArchivedObject>& object, OutputArchive& archive) {
  try {
    object.part.save(archive);
  } catch (...) {
    Blame(object);
  }
}

std::string ToBytes(OutputArchive& archive) {
  std::ostringstream stream;
  archive.save_to(stream);
  return std::move(stream).str();
}

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
      lines.push_back(OfModel(name) + "parameter " + Quoted(key) + " " + TypeAndShape(tensor));
    }
    for (const auto& [key, tensor] : BuffersOf(*model)) {
      lines.push_back(OfModel(name) + "buffer " + Quoted(key) + " " + TypeAndShape(tensor));
    }
  }
  for (const auto& [name, optimizer] : parts.optimizers) {
    const torch::optim::Optimizer& one = *optimizer;
    // Its class is compared between the ranks, as broadcast_optimizer_state does, not with the
    // file.
    lines.push_back("optimizer " + Quoted(name) + ", " + c10::demangle(typeid(one).name()));
    for (const std::string& line : DescribeOptimizer(one)) {
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

void WriteHeader(int ranks, OutputArchive& archive) {
  archive.write("format", c10::IValue(kFormat));
  archive.write("ranks", c10::IValue(static_cast<std::int64_t>(ranks)));
}

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
    OutputArchive one(archive.compilation_unit());
    SaveOptimizer(*optimizer, one);
    all.write(std::to_string(names.size()), one);
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

  const auto generators = GeneratorsOf(parts);
  Tensors states;
  for (std::size_t i = 0; i < generators.size(); ++i) {
    if (!generator_states[i].defined()) continue;
    states.insert(generators[i].name, generator_states[i]);
  }
  archive.write("generators", c10::IValue(states));
}

int ReadHeader(InputArchive& archive) {
  const auto format = Read<std::int64_t>(archive, "format");
  if (format > kFormat) {
    throw std::runtime_error("it has format " + std::to_string(format) +
                             ", of a newer version of the library; this one reads up to " +
                             std::to_string(kFormat));
  }
  return static_cast<int>(Read<std::int64_t>(archive, "ranks"));
}

ReadModels::ReadModels(const CheckpointParts& parts, InputArchive& archive) {
  const auto parameters = Read<Dict<Tensors>>(archive, "model_parameters");
  const auto buffers = Read<Dict<Tensors>>(archive, "model_buffers");
  const auto add = [this](const Tensors& saved, const std::vector<NamedTensor>& present) {
    for (const auto& [name, tensor] : present) copies_.push_back({saved.at(name), tensor});
  };
  for (const auto& [name, model] : parts.models) {
    const Tensors saved_parameters = Find(parameters, name, "model");
    const Tensors saved_buffers = Find(buffers, name, "model");
    CheckTensors(name, "parameter", saved_parameters, ParametersOf(*model));
    CheckTensors(name, "buffer", saved_buffers, BuffersOf(*model));
    add(saved_parameters, ParametersOf(*model));
    add(saved_buffers, BuffersOf(*model));
  }
}

void ReadModels::Apply() const {
  const at::NoGradGuard no_grad;
  for (const auto& [from, to] : copies_) to.copy_(from);
}

void LoadOptimizers(const CheckpointParts& parts, InputArchive& archive) {
  if (parts.optimizers.empty()) return;
  const auto names = Read<Names>(archive, "optimizer_names");
  const auto descriptions = Read<Dict<Names>>(archive, "optimizer_parameters");
  InputArchive all = ReadNested(archive, "optimizers", "optimizers");
  for (const auto& [name, optimizer] : parts.optimizers) {
    const std::string key = IndexOf(names, name, "optimizer");
    CheckOptimizer(name, Find(descriptions, name, "optimizer"), DescribeOptimizer(*optimizer));
    InputArchive one = ReadNested(all, key, "optimizer " + Quoted(name));
    LoadOptimizer(*optimizer, one);
  }
}

std::vector<at::Tensor> ReadGeneratorStates(const CheckpointParts& parts, InputArchive& archive) {
  const auto states = Read<Tensors>(archive, "generators");
  std::vector<at::Tensor> list;
  for (const auto& one : GeneratorsOf(parts)) {
    // A run that is on GPUs now may have been on the CPU.
    const bool may_lack = IsGpuGenerator(one.name) && !states.contains(one.name);
    list.push_back(may_lack ? at::Tensor() : Find(states, one.name, "generator"));
  }
  return list;
}

void ReadSmallParts(const CheckpointParts& parts, const Reader& reader, InputArchive& archive) {
  const auto schedulers = Read<Dict<Dict<double>>>(archive, "schedulers");
  for (const auto& [name, scheduler] : parts.schedulers) {
    SchedulerPosition position;
    for (const auto& item : Find(schedulers, name, "scheduler")) {
      position[item.key()] = item.value();
    }
    try {
      std::visit([&position](auto* one) { SetPosition(*one, position); }, scheduler);
    } catch (const std::exception& error) {
      throw std::runtime_error("scheduler " + Quoted(name) +
                               " is of another kind: " + error.what());
    }
  }

  const ValueDicts values = {
      Read<Dict<std::int64_t>>(archive, "integers"), Read<Dict<double>>(archive, "numbers"),
      Read<Dict<std::string>>(archive, "texts"), Read<Tensors>(archive, "tensors")};
  for (const auto& [name, value] : parts.values) {
    std::visit([&values, &key = name](auto* one) { values.Get(key, one); }, value);
  }

  const auto names = Read<Names>(archive, "object_names");
  for (const auto& object : parts.objects) {
    const std::string key = IndexOf(names, object.name, "object");
    InputArchive all = ReadNested(archive, "objects", "objects");
    InputArchive one = ReadNested(all, key, "object " + Quoted(object.name));
    LoadObject(object, one);
  }

  const auto generators = GeneratorsOf(parts);
  const auto states = ReadGeneratorStates(parts, archive);
  for (std::size_t i = 0; i < generators.size(); ++i) {
    if (states[i].defined()) SetGeneratorState(generators[i].part, states[i], reader);
  }
}

}  // namespace sirtaki::detail
