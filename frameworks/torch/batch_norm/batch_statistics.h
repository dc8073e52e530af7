// Mean and variance of a batch that is spread over the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace sirtaki::detail {

// What one rank has of it. Mean and sum of squared deviations from that mean, not sums of values
// and squares: those lose all digits where the mean is large beside the deviation.
struct BatchShare {
  double count = 0;    // values per channel
  at::Tensor mean;     // float64 [C]; 0 if count is 0
  at::Tensor squares;  // float64 [C]; sum of (x - mean)²
};

// Returns the share of `input` [N, C, ...], float32 or float64. Autograd does not see it.
BatchShare ShareOf(const at::Tensor& input);

// Pure. All of it, with the same bits wherever it is computed from the same shares in one order.
// Precondition: at least one share.
BatchShare Join(const std::vector<BatchShare>& shares);

}  // namespace sirtaki::detail
