// The random generators of a checkpoint. Of one rank; nothing here is collective.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "sirtaki/checkpoint.h"

namespace sirtaki::detail {

// LibTorch's default generator first, then the default ones of the models' GPUs, then those of the
// checkpoint.
std::vector<NamedPart<at::Generator>> GeneratorsOf(const CheckpointParts& parts);

// True for one that GeneratorsOf adds for a GPU.
bool IsGpuGenerator(const std::string& name);

at::Tensor StateOfGenerator(at::Generator generator);

// A Reader is the rank that reads, and the size of its job.
struct Reader {
  int rank = 0;
  int ranks = 1;
};

// The state that the generator of this kind comes to. `states`: of all ranks that wrote, a row
// each. If they were as many, it is the reader's own; else that of a seed made from the first one's.
// Throws what LibTorch throws for the state of another kind.
at::Tensor NextState(const at::Generator& generator, const at::Tensor& states,
                     const Reader& reader);

void SetStateOfGenerator(at::Generator generator, const at::Tensor& state);

}  // namespace sirtaki::detail
