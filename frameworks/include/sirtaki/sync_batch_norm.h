// SyncBatchNorm normalizes over the joined batch of all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/options/batchnorm.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

#include "sirtaki/export.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

namespace detail {
class SyncBatchNormCalls;
struct SyncBatchNormCall;
struct SyncBatchNormTensors;
}  // namespace detail

// A SyncBatchNorm takes the place of torch::nn::BatchNorm1d, 2d and 3d, with their options,
// parameters and buffers, so that checkpoints go both ways:
//
//   sirtaki::SyncBatchNorm norm(torch::nn::BatchNormOptions(64).eps(1e-3));
//
// In training, mean and variance are those of the batches of all ranks together (of the ranks of
// the given set: give it the optimizer's), and so is the gradient of the input. Batches may differ
// in size, and may be empty on some ranks. The gradients of weight and bias are this rank's share,
// like those of any parameter: the optimizer averages them. In evaluation it is plain batch
// normalization, with no communication and no session; with track_running_stats(false) it uses the
// statistics of this rank's batch.
//
// In training, forward() is collective and waits for the other ranks, and so is backward() if the
// input requires a gradient on any rank. The ranks call the modules in the same order, and all
// ranks or none have a gradient to compute.
//
// Inputs are float32 or float64; or float16 or bfloat16 with parameters of their own type or of
// float32, by statistics in float32. They are on the CPU or on a GPU, which nobody waits for: the
// hosts agree on what they have to know. With one rank it is torch::batch_norm. Gradients of
// gradients exist with one rank only; with more, differentiating what backward(create_graph) made
// throws Unsupported.
//
// A module may be made before init(): each forward() in training throws NotInitialized while there
// is no job. Call one forward() of a module at a time.
class SIRTAKI_API SyncBatchNormImpl : public torch::nn::Cloneable<SyncBatchNormImpl> {
 public:
  // `call_name` matches the module with those of the other ranks. Modules without one are matched
  // by the order of their first forward() in training, which is enough unless several threads run
  // modules at the same time. A clone is a module of its own.
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                             const ProcessSet& process_set = {}, const std::string& call_name = {});

  void reset() override;  // for clone(), as with all modules of LibTorch
  void reset_running_stats();
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  // `input` is [N, C, ...] with C = num_features, 2 or more dimensions; N may be 0 and may differ
  // between ranks. Returns the same shape and type. Every rank throws InvalidArgument if any
  // rank's input does not fit, or if all of them together have a single value per channel.
  at::Tensor forward(const at::Tensor& input);

  torch::nn::BatchNormOptions options;
  at::Tensor weight;               // [C]; undefined without affine
  at::Tensor bias;                 // [C]
  at::Tensor running_mean;         // [C]; undefined without track_running_stats
  at::Tensor running_var;          // [C]
  at::Tensor num_batches_tracked;  // int64, 0 dimensions

 private:
  friend class SyncBatchNormConverter;
  // Takes the tensors of another module for its own.
  SyncBatchNormImpl(const torch::nn::BatchNormOptions& options,
                    const detail::SyncBatchNormTensors& tensors, const ProcessSet& process_set,
                    const std::string& call_name);

  void Register(const detail::SyncBatchNormTensors& tensors);
  at::Tensor ForwardAlone(const at::Tensor& input, bool by_batch);
  double CountBatch();
  void FollowOnGpu(const at::Tensor& rows, detail::SyncBatchNormCall& call);

  std::shared_ptr<detail::SyncBatchNormCalls> calls_;
};

TORCH_MODULE(SyncBatchNorm);

// Replaces each BatchNorm1d, 2d and 3d that is an element of a Sequential anywhere in the module by
// a SyncBatchNorm that has the same parameter and buffer tensors (optimizers made before stay
// valid), options and mode. Returns the number that it has replaced; none at all is logged as a
// warning. References and pointers to the replaced modules are invalid afterwards. Not collective,
// but every rank has to do it.
//
// A BatchNorm anywhere else cannot be replaced: the code that calls it names its type, which C++
// has fixed at compile time. Then nothing is changed and InvalidArgument is thrown, which names
// every such module:
//
//   - a member of a module of yours, an element of a ModuleList or ModuleDict: declare it as
//     sirtaki::SyncBatchNorm, which in a job of one rank is a plain BatchNorm;
//   - an element of a Sequential that something else refers to as well, such as a variable of type
//     BatchNorm2d that is still alive;
//   - a module of a class derived from BatchNorm.
SIRTAKI_API std::int64_t convert_sync_batchnorm(torch::nn::Module& module,
                                                const ProcessSet& process_set = {});

}  // namespace sirtaki
