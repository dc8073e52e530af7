#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <torch/serialize.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "sirtaki/detail/elastic_parts.h"
#include "sirtaki/objects.h"

namespace sirtaki::detail {

std::string ElasticName(const char* kind, const std::string& name) {
  return kind + (" " + core::Quoted(name));
}

std::string ElasticType(const std::type_info& type) {
  return " of type " + c10::demangle(type.name());
}

ElasticPart ElasticTensorPart(const std::string& name, at::Tensor& value) {
  ElasticPart part;
  part.name = ElasticName("value", name);
  part.type = ElasticType(typeid(at::Tensor));
  // Returns a copy that has what a program gives to a tensor.
  const auto copy = [](const at::Tensor& from, c10::Device device) {
    const at::NoGradGuard no_grad;
    return from.detach()
        .to(device, from.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
        .set_requires_grad(from.requires_grad());
  };
  const auto make_copy = [&value, copy]() -> ElasticCopy {
    const auto kept = std::make_shared<at::Tensor>();
    return {
        [&value, kept, copy] {
          return ElasticKeep(kept, value.defined() ? copy(value, value.device()) : at::Tensor());
        },
        [&value, kept, copy] {
          value = kept->defined() ? copy(*kept, kept->device()) : at::Tensor();
        },
    };
  };
  part.commit = make_copy();
  part.step = make_copy();
  part.tensors = [&value] { return std::vector<at::Tensor>{value}; };
  // The root's device may be none of this rank's; a list may be empty.
  part.save = [&value, copy](const WriteBytes& write) {
    std::vector<at::Tensor> list;
    if (value.defined()) list.push_back(copy(value, c10::kCPU));
    torch::save(list, write);
  };
  part.load = [&value, copy](const ReadBytes& read, const std::function<std::size_t()>& size) {
    const c10::Device device = value.defined() ? value.device() : c10::Device(c10::kCPU);
    std::vector<at::Tensor> list;
    torch::load(list, read, size);
    value = list.empty() ? at::Tensor() : copy(list.front(), device);
  };
  return part;
}

namespace {

// The tensors in a value, in an order that depends on how it is made up.
std::vector<at::Tensor> TensorsOf(const std::vector<at::Tensor>& value) { return value; }
std::vector<at::Tensor> TensorsOf(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  value.visit([&tensors](const c10::IValue& one) {
    if (one.isTensor()) tensors.push_back(one.toTensor());
    return false;
  });
  return tensors;
}

// Puts these in the place of the tensors in a value.
void Replace(std::vector<at::Tensor>& value, const std::vector<at::Tensor>& tensors) {
  value = tensors;
}
void Replace(c10::IValue& value, const std::vector<at::Tensor>& tensors) {
  const std::vector<at::Tensor> before = TensorsOf(value);
  c10::IValue::HashIdentityIValueMap copies;
  for (std::size_t i = 0; i < tensors.size(); ++i) copies.emplace(before[i], tensors[i]);
  value = value.deepcopy(copies);
}

using SizeOf = std::function<std::size_t()>;
void LoadOnCpu(std::vector<at::Tensor>& value, const ReadBytes& read, const SizeOf& size) {
  torch::load(value, read, size, c10::kCPU);
}
void LoadOnCpu(c10::IValue& value, const ReadBytes& read, const SizeOf& size) {
  torch::serialize::InputArchive archive;
  archive.load_from(read, size, c10::kCPU);
  archive.read("value", value);
}

template <class T>
void TakeTensors(T& value, const ReadBytes& read, const SizeOf& size) {
  T received;
  LoadOnCpu(received, read, size);
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> before = TensorsOf(value);
  std::vector<at::Tensor> now = TensorsOf(received);
  const auto place_of = [&](std::size_t i) {
    // One that is longer than it was here goes on where it begins.
    if (before.size() != now.size()) i = std::min(i, before.size() - 1);
    return before[i].defined() ? before[i].device() : c10::Device(c10::kCPU);
  };
  for (std::size_t i = 0; i < now.size() && !before.empty(); ++i) {
    if (!now[i].defined()) continue;
    now[i] = now[i].detach().to(place_of(i)).set_requires_grad(now[i].requires_grad());
  }
  Replace(received, now);
  value = std::move(received);
}

}  // namespace

void ElasticTake(std::vector<at::Tensor>& value, const ReadBytes& read, const SizeOf& size) {
  TakeTensors(value, read, size);
}
void ElasticTake(c10::IValue& value, const ReadBytes& read, const SizeOf& size) {
  TakeTensors(value, read, size);
}

}  // namespace sirtaki::detail
