// SyncBatchNorm's arithmetic on a GPU, by the kernels that LibTorch has for it. Everything is put
// into the current stream; nothing is read back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "frameworks/torch/batch_norm/sync_batch_norm_impl.h"

namespace sirtaki::detail {

// What this rank's batch [N, C, ...] is to the others: [1, 2 C + 1], its mean, 1 / sqrt(variance +
// eps), and count. Zeros if it is empty.
at::Tensor GpuRow(const at::Tensor& input, double eps);

// Fills in call.on_gpu. `rows`: of all ranks, of which call.count_of_rank tells which are empty.
// The running statistics are of the rows' type, and move by `momentum`; undefined: there are none.
void JoinGpuRows(const at::Tensor& rows, const at::Tensor& running_mean,
                 const at::Tensor& running_var, double momentum, SyncBatchNormCall& call);

// Precondition: the batch is not empty.
at::Tensor NormalizeOnGpu(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                          const std::optional<at::Tensor>& bias, const SyncBatchNormCall& call);

struct GpuSums {
  at::Tensor of_dy;  // [2 C], in the ComputingType: sums of dy, and of dy times x - mean
  // The gradients of weight and bias are this rank's; undefined without a weight.
  at::Tensor weight_gradient;
  at::Tensor bias_gradient;
};

GpuSums GpuSumsOf(const at::Tensor& dy, const at::Tensor& x,
                  const std::optional<at::Tensor>& weight, const SyncBatchNormCall& call);

// `sums`: GpuSums::of_dy, summed over the ranks. Precondition: x is not empty.
at::Tensor GpuInputGradient(const at::Tensor& dy, const at::Tensor& x,
                            const std::optional<at::Tensor>& weight, const at::Tensor& sums,
                            const SyncBatchNormCall& call);

}  // namespace sirtaki::detail
