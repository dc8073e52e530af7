// check_parameters() finds out whether all ranks still have the same model.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/process_set.h"

namespace torch::nn {
class Module;
}

namespace sirtaki {

// Compares the module's parameters and buffers between the ranks, bit by bit: names, types, shapes,
// then the values by a 64-bit digest of each tensor. Collective. If all are equal it costs a read
// of the tensors and one all-gather of 16 bytes a rank.
//
// Every rank throws Mismatch if the ranks differ. The text names the first difference and which
// ranks have what; for values also the first element that differs between the lowest rank and the
// first rank that disagrees with it. (Ranks that start alike and average their gradients stay
// alike. They drift apart by a parameter that was changed on one rank only, a forgotten
// broadcast_parameters, or buffers that each rank updates from its own data, such as running
// statistics of BatchNorm.)
//
// Bits are compared, not numbers: 0.0 differs from -0.0, and a NaN equals the same NaN. Every rank
// throws InvalidArgument if any rank has a tensor that is not dense, or is neither in host memory
// nor on a GPU of CUDA's. With one rank the function does nothing.
SIRTAKI_API void check_parameters(const torch::nn::Module& module,
                                  const ProcessSet& process_set = {});

// Does the same for named tensors, for instance model->named_parameters().pairs().
SIRTAKI_API void check_parameters(
    const std::vector<std::pair<std::string, at::Tensor>>& named_tensors,
    const ProcessSet& process_set = {});

}  // namespace sirtaki
