// What SyncBatchNorm is made of: the tensors it shares with BatchNorm, its name between the ranks,
// and its node in the autograd graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/batch_norm/batch_statistics.h"
#include "frameworks/torch/session/session_set.h"
#include "sirtaki/process_set.h"

namespace sirtaki::detail {

struct SyncBatchNormTensors {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
  at::Tensor num_batches_tracked;
};

// What the ranks call a module, and how often it was called. The name is taken when a session first
// sees the module, since it may be made before there is one.
class SyncBatchNormCalls {
 public:
  SyncBatchNormCalls(ProcessSet process_set, std::string name,
                     std::shared_ptr<SessionState> given = SessionScope::Given())
      : process_set_(std::move(process_set)), name_(std::move(name)), given_(std::move(given)) {}

  // Returns the calls of a copy of the module.
  std::shared_ptr<SyncBatchNormCalls> Anew() const {
    return std::make_shared<SyncBatchNormCalls>(process_set_, name_, given_);
  }

  // The set and its session, in which the module then has a key. Throws NotInitialized without
  // one.
  SessionSet Enter();
  // "sync_batch_norm/features.1". Precondition: Enter was called.
  const std::string& key() const { return key_; }

  std::int64_t number = 0;  // of the next call in this session; the ranks agree on rank 0's

 private:
  const ProcessSet process_set_;
  const std::string name_;
  const std::shared_ptr<SessionState> given_;  // null: the process's own session
  std::weak_ptr<SessionState> entered_;
  std::string key_;
};

// A batch of all ranks, on the GPU of one of them. Undefined if it is empty.
struct GpuBatch {
  at::Tensor mean;    // [C], in the ComputingType of the input
  at::Tensor invstd;  // 1 / sqrt(variance + eps), like mean
  at::Tensor counts;  // int32; values per channel, of the ranks that have some
};

// One forward(), as its backward() needs it.
struct SyncBatchNormCall : torch::CustomClassHolder {
  explicit SyncBatchNormCall(SessionSet of) : set(std::move(of)) {}

  const SessionSet set;
  std::string key;
  std::int64_t number = 0;
  int ranks = 0;                      // that have not joined
  std::vector<double> count_of_rank;  // values per channel
  BatchShare batch;                   // of all ranks; on a GPU only its count is here
  at::Tensor variance;                // float64 [C]; biased
  GpuBatch on_gpu;                    // if the input is on one: what batch and variance are else
  double eps = 0;
  bool reduces = false;  // the input needs a gradient on some rank
};

// Normalizes `input` [N, C, ...] by the call's batch; differentiable once.
struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  using Call = c10::intrusive_ptr<SyncBatchNormCall>;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const Call& call);
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients);
};

// The type in which LibTorch's kernels compute with `type`: float32 for the half types.
inline at::ScalarType ComputingType(at::ScalarType type) {
  return at::isReducedFloatingType(type) ? at::kFloat : type;
}

}  // namespace sirtaki::detail
