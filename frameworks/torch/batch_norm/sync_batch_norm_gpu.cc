#include "frameworks/torch/batch_norm/sync_batch_norm_gpu.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <tuple>
#include <vector>

namespace sirtaki::detail {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

at::Tensor Dense(const at::Tensor& tensor) {
  return tensor.contiguous(tensor.suggest_memory_format());
}

// Some of the kernels take parameters of float16 beside statistics of float32, others do not; all
// of them take both in float32.
MaybeTensor Like(const at::Tensor& statistics, const MaybeTensor& parameter) {
  return parameter ? MaybeTensor(parameter->to(statistics.scalar_type())) : std::nullopt;
}

// The type in which the sums over a batch are right. The kernel for contiguous batches [N, C, ...]
// keeps parts of a sum in the input's type, as LibTorch 2.11 showed: float16 then overflows, and
// bfloat16 has three digits. The one for channels-last batches adds up in float32.
at::ScalarType SummingType(const at::Tensor& x) {
  const bool contiguous = x.suggest_memory_format() == at::MemoryFormat::Contiguous;
  return contiguous ? ComputingType(x.scalar_type()) : x.scalar_type();
}

// The kernels divide by a rank's count.
at::Tensor WithoutEmpty(const at::Tensor& rows, const std::vector<double>& count_of_rank) {
  std::vector<at::Tensor> there;
  for (std::size_t rank = 0; rank < count_of_rank.size(); ++rank) {
    if (count_of_rank[rank] == 0) continue;
    there.push_back(rows.narrow(0, static_cast<std::int64_t>(rank), 1));
  }
  return there.size() == count_of_rank.size() ? rows : at::cat(there);
}

}  // namespace

at::Tensor GpuRow(const at::Tensor& input, double eps) {
  at::NoGradGuard no_grad;
  const std::int64_t channels = input.size(1);
  const auto options = input.options().dtype(ComputingType(input.scalar_type()));
  if (input.numel() == 0) return at::zeros({1, 2 * channels + 1}, options);
  const auto [mean, invstd] = at::batch_norm_stats(Dense(input.detach()), eps);
  const at::Tensor count = at::full({1}, input.numel() / channels, options);
  return at::cat({mean, invstd, count}).unsqueeze(0);
}

void JoinGpuRows(const at::Tensor& rows, const at::Tensor& running_mean,
                 const at::Tensor& running_var, double momentum, SyncBatchNormCall& call) {
  at::NoGradGuard no_grad;
  if (call.batch.count == 0) return;
  const at::Tensor there = WithoutEmpty(rows, call.count_of_rank);
  const std::int64_t channels = (there.size(1) - 1) / 2;
  const at::Tensor counts = there.select(1, 2 * channels);
  // The kernel looks only at the type of its first argument, which has to be that of the counts:
  // float16 would not hold them.
  std::tie(call.on_gpu.mean, call.on_gpu.invstd) = at::batch_norm_gather_stats_with_counts(
      there, there.narrow(1, 0, channels), there.narrow(1, channels, channels), running_mean,
      running_var, momentum, call.eps, counts);
  call.on_gpu.counts = counts.to(at::kInt);
}

at::Tensor NormalizeOnGpu(const at::Tensor& input, const MaybeTensor& weight,
                          const MaybeTensor& bias, const SyncBatchNormCall& call) {
  const at::Tensor& mean = call.on_gpu.mean;
  return at::batch_norm_elemt(Dense(input), Like(mean, weight), Like(mean, bias), mean,
                              call.on_gpu.invstd, call.eps);
}

GpuSums GpuSumsOf(const at::Tensor& dy, const at::Tensor& x, const MaybeTensor& weight,
                  const SyncBatchNormCall& call) {
  GpuSums sums;
  if (x.numel() == 0) {
    const auto options = x.options().dtype(ComputingType(x.scalar_type()));
    sums.of_dy = at::zeros({2 * x.size(1)}, options);
    if (weight) sums.weight_gradient = sums.bias_gradient = at::zeros({x.size(1)}, options);
    return sums;
  }
  const at::ScalarType type = SummingType(x);
  at::Tensor of_dy;
  at::Tensor of_dy_x;
  std::tie(of_dy, of_dy_x, sums.weight_gradient, sums.bias_gradient) =
      at::batch_norm_backward_reduce(dy.to(type), x.to(type), call.on_gpu.mean, call.on_gpu.invstd,
                                     Like(call.on_gpu.mean, weight),
                                     /*input_g=*/true, /*weight_g=*/weight.has_value(),
                                     /*bias_g=*/weight.has_value());
  sums.of_dy = at::cat({of_dy, of_dy_x});
  return sums;
}

at::Tensor GpuInputGradient(const at::Tensor& dy, const at::Tensor& x, const MaybeTensor& weight,
                            const at::Tensor& sums, const SyncBatchNormCall& call) {
  const std::int64_t channels = x.size(1);
  return at::batch_norm_backward_elemt(dy, x, call.on_gpu.mean, call.on_gpu.invstd,
                                       Like(call.on_gpu.mean, weight), sums.narrow(0, 0, channels),
                                       sums.narrow(0, channels, channels), call.on_gpu.counts);
}

}  // namespace sirtaki::detail
