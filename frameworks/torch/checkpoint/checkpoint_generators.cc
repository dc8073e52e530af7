#include "frameworks/torch/checkpoint/checkpoint_generators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "frameworks/torch/tensors/seed_mix.h"

namespace sirtaki::detail {
namespace {

constexpr char kDefaultGenerator[] = "default";
constexpr char kGpuGenerator[] = "default of GPU ";

// GPUs stand in the order in which the models' tensors name them: the ranks' GPUs have other
// numbers.
std::vector<c10::Device> GpusOf(const CheckpointParts& parts) {
  std::vector<c10::Device> gpus;
  for (const auto& model : parts.models) {
    for (const auto& list : {model.part->parameters(), model.part->buffers()}) {
      for (const at::Tensor& tensor : list) {
        if (!tensor.defined() || !tensor.is_cuda()) continue;
        const bool known = std::find(gpus.begin(), gpus.end(), tensor.device()) != gpus.end();
        if (!known) gpus.push_back(tensor.device());
      }
    }
  }
  return gpus;
}

}  // namespace

std::vector<NamedPart<at::Generator>> GeneratorsOf(const CheckpointParts& parts) {
  std::vector<NamedPart<at::Generator>> all = {
      {kDefaultGenerator, at::detail::getDefaultCPUGenerator()}};
  const std::vector<c10::Device> gpus = GpusOf(parts);
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    all.push_back(
        {kGpuGenerator + std::to_string(i), at::globalContext().defaultGenerator(gpus[i])});
  }
  all.insert(all.end(), parts.generators.begin(), parts.generators.end());
  return all;
}

bool IsGpuGenerator(const std::string& name) { return name.rfind(kGpuGenerator, 0) == 0; }

at::Tensor StateOfGenerator(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

at::Tensor NextState(const at::Generator& generator, const at::Tensor& states,
                     const Reader& reader) {
  at::Generator scratch = generator.clone();
  if (states.size(0) == reader.ranks) {
    // A copy: set_state() of a tensor that does not begin its storage goes wrong in LibTorch.
    scratch.set_state(states[reader.rank].clone());
    return scratch.get_state();
  }
  // The seed comes from what rank 0 had: it is the same in every run that goes on from this file.
  const at::Tensor first = states[0].contiguous();
  std::uint64_t seed = 0;
  for (std::int64_t i = 0; i < first.numel(); ++i) {
    seed = SplitMix64(seed ^ first.const_data_ptr<std::uint8_t>()[i]);
  }
  scratch.set_current_seed(SeedOfRank(seed, reader.rank));
  return scratch.get_state();
}

void SetStateOfGenerator(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace sirtaki::detail
