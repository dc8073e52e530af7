#include "frameworks/torch/batch_norm/batch_statistics.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace sirtaki::detail {

BatchShare ShareOf(const at::Tensor& input) {
  at::NoGradGuard no_grad;
  const auto channels = input.size(1);
  BatchShare share;
  if (input.numel() == 0) {
    share.mean = at::zeros({channels}, at::kDouble);
    share.squares = at::zeros({channels}, at::kDouble);
    return share;
  }
  share.count = static_cast<double>(input.numel() / channels);
  // LibTorch's own kernel of BatchNorm, which sums in float64; without running statistics to
  // update, the momentum does not matter.
  const auto [mean, variance] = at::batch_norm_update_stats(input, {}, {}, /*momentum=*/0.0);
  share.mean = mean.to(at::kDouble);
  share.squares = variance.to(at::kDouble) * share.count;
  return share;
}

BatchShare Join(const std::vector<BatchShare>& shares) {
  at::NoGradGuard no_grad;
  BatchShare all;
  all.mean = at::zeros_like(shares[0].mean);
  all.squares = at::zeros_like(all.mean);
  for (const BatchShare& share : shares) all.count += share.count;
  if (all.count == 0) return all;
  // An empty share's mean says nothing; it counts for nothing here.
  for (const BatchShare& share : shares) all.mean += share.mean * (share.count / all.count);
  for (const BatchShare& share : shares) {
    const at::Tensor distance = share.mean - all.mean;
    all.squares += share.squares + distance * distance * share.count;
  }
  return all;
}

}  // namespace sirtaki::detail
