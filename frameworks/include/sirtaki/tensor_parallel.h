// Layers that are split over the ranks of a process set: each rank has a part of the weights, and
// the ranks compute the layer together.
//
//   const auto mesh = sirtaki::mesh({{"data", -1}, {"tensor", 2}});
//   const auto tensor = mesh.set("tensor");
//   sirtaki::ColumnParallelLinear expand(
//       sirtaki::ColumnParallelLinearOptions(256, 1024).process_set(tensor));
//   sirtaki::RowParallelLinear contract(
//       sirtaki::RowParallelLinearOptions(1024, 256).process_set(tensor));
//   y = contract(torch::gelu(expand(x)));  // one all-reduce forward, and one backward
//
// The ranks of the set give their layers the same inputs, and get the same outputs. So their losses
// are the same loss, and gradients are those of that one loss: of a part of a weight, what the
// unsplit layer's gradient has there. Average gradients over the ranks that have the same part:
//
//   sirtaki::DistributedOptimizerOptions().process_set(mesh.set("data"))
//
// What is told to broadcast or average different parts over one set throws Mismatch.
//
// A layer is initialised as the unsplit one would be, to the bit, if the ranks' generators are equal:
// each draws the whole, keeps its part, and lets the rest go. Dropout in the same place on the ranks
// needs equal generators as well.
//
// Constructors are collective over the set, and the ranks make the layers in the same order. They
// throw on all ranks: Mismatch if options differ, InvalidArgument if sizes cannot be shared. Sizes
// need not divide: the first ranks have one more. forward() and backward() of a split layer are
// collective; call one forward() of a layer at a time. A rank whose input does not fit is told to all
// of the set, where the call has to do with them. A set of one rank costs nothing.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/enum.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <variant>

#include "sirtaki/detail/parallel_layer.h"
#include "sirtaki/export.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

struct ColumnParallelLinearOptions {
  ColumnParallelLinearOptions(std::int64_t in_features, std::int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}

  TORCH_ARG(std::int64_t, in_features);
  TORCH_ARG(std::int64_t, out_features);  // of the whole layer
  TORCH_ARG(bool, bias) = true;
  // True: forward() returns all features on every rank, at the price of an all-gather.
  TORCH_ARG(bool, gather_output) = false;
  // The features are that many equal blocks, one after the other, and each is split by itself: 3
  // where one matrix makes q, k and v.
  TORCH_ARG(std::int64_t, blocks) = 1;
  // Each rank gets a multiple of that many features of a block: the width of an attention head.
  TORCH_ARG(std::int64_t, unit) = 1;
  TORCH_ARG(ProcessSet, process_set);
  // Stands in errors. Default: the number of the layer in its set.
  TORCH_ARG(std::string, name);
};

// A ColumnParallelLinear is a torch::nn::Linear whose output features are split: rows of the weight,
// and the bias with them. The gradient of its input is added up over the ranks while the gradient of
// the weight is computed.
class SIRTAKI_API ColumnParallelLinearImpl : public torch::nn::Cloneable<ColumnParallelLinearImpl> {
 public:
  explicit ColumnParallelLinearImpl(const ColumnParallelLinearOptions& options);

  void reset() override;  // for clone(), as with all modules of LibTorch
  void pretty_print(std::ostream& stream) const override;

  // [..., in_features], the same on all ranks, becomes [..., this rank's features], or with
  // gather_output [..., out_features].
  at::Tensor forward(const at::Tensor& input);

  ColumnParallelLinearOptions options;
  at::Tensor weight;  // [this rank's features, in_features]
  at::Tensor bias;    // [this rank's features]; undefined without

 private:
  detail::ParallelLayer layer_;
};

TORCH_MODULE(ColumnParallelLinear);

struct RowParallelLinearOptions {
  RowParallelLinearOptions(std::int64_t in_features, std::int64_t out_features)
      : in_features_(in_features), out_features_(out_features) {}

  TORCH_ARG(std::int64_t, in_features);  // of the whole layer
  TORCH_ARG(std::int64_t, out_features);
  TORCH_ARG(bool, bias) = true;
  // False: every rank gives all features, and forward() takes this rank's.
  TORCH_ARG(bool, input_is_parallel) = true;
  TORCH_ARG(std::int64_t, unit) = 1;  // as that of the layer before
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(std::string, name);
};

// A RowParallelLinear is a torch::nn::Linear whose input features are split: columns of the weight.
// The ranks' results are added up, and then the bias, which all ranks have, is added once.
class SIRTAKI_API RowParallelLinearImpl : public torch::nn::Cloneable<RowParallelLinearImpl> {
 public:
  explicit RowParallelLinearImpl(const RowParallelLinearOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  // [..., this rank's features], or without input_is_parallel [..., in_features], becomes
  // [..., out_features], the same bits on all ranks.
  at::Tensor forward(const at::Tensor& input);

  RowParallelLinearOptions options;
  at::Tensor weight;  // [out_features, this rank's features]
  at::Tensor bias;    // [out_features]; undefined without

 private:
  detail::ParallelLayer layer_;
};

TORCH_MODULE(RowParallelLinear);

struct ParallelEmbeddingOptions {
  ParallelEmbeddingOptions(std::int64_t num_embeddings, std::int64_t embedding_dim)
      : num_embeddings_(num_embeddings), embedding_dim_(embedding_dim) {}

  TORCH_ARG(std::int64_t, num_embeddings);  // of the whole layer
  TORCH_ARG(std::int64_t, embedding_dim);
  TORCH_ARG(std::optional<std::int64_t>, padding_idx);  // its row is zero, and gets no gradient
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(std::string, name);
};

// A ParallelEmbedding is a torch::nn::Embedding whose vocabulary is split: rows of the weight.
class SIRTAKI_API ParallelEmbeddingImpl : public torch::nn::Cloneable<ParallelEmbeddingImpl> {
 public:
  explicit ParallelEmbeddingImpl(const ParallelEmbeddingOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  // Ids of any shape, int64 or int32, the same on all ranks, become [..., embedding_dim]. On the CPU
  // all ranks throw InvalidArgument for an id that is not in the vocabulary.
  at::Tensor forward(const at::Tensor& ids);

  // A model whose last layer has the embedding's matrix takes its logits from here:
  // [..., embedding_dim] becomes [..., this rank's part of the vocabulary].
  at::Tensor logits(const at::Tensor& input);

  ParallelEmbeddingOptions options;
  at::Tensor weight;  // [this rank's part of the vocabulary, embedding_dim]

 private:
  detail::ParallelLayer layer_;
};

TORCH_MODULE(ParallelEmbedding);

struct ParallelCrossEntropyOptions {
  // NOLINTNEXTLINE(google-explicit-constructor): as LibTorch's options
  ParallelCrossEntropyOptions(std::int64_t num_classes) : num_classes_(num_classes) {}

  using Reduction =
      std::variant<torch::enumtype::kNone, torch::enumtype::kMean, torch::enumtype::kSum>;

  TORCH_ARG(std::int64_t, num_classes);  // of all ranks together
  TORCH_ARG(Reduction, reduction) = torch::kMean;
  TORCH_ARG(std::int64_t, ignore_index) = -100;  // targets that do not count
  TORCH_ARG(double, label_smoothing) = 0.0;
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(std::string, name);
};

// A ParallelCrossEntropy is a torch::nn::CrossEntropyLoss of logits that are split over the classes.
// The ranks exchange three numbers for each target, once, in forward(): the largest logit, the sum of
// exponentials over it, and the target's logit. It can be differentiated once.
class SIRTAKI_API ParallelCrossEntropyImpl : public torch::nn::Cloneable<ParallelCrossEntropyImpl> {
 public:
  explicit ParallelCrossEntropyImpl(const ParallelCrossEntropyOptions& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  // Logits are [..., this rank's classes], targets int64 [...], the same on all ranks. Returns a
  // number, or without a reduction [...]: the same bits on all ranks.
  at::Tensor forward(const at::Tensor& logits, const at::Tensor& target);

  ParallelCrossEntropyOptions options;

 private:
  detail::ParallelLayer layer_;
};

TORCH_MODULE(ParallelCrossEntropy);

// Returns whether the tensor is this rank's part of a parameter of a split layer.
SIRTAKI_API bool is_split(const at::Tensor& parameter);

// Returns the whole of which the parameter is a part, in new memory, on all ranks of its layer's set:
// collective there. A parameter that is not split is returned as it is, detached.
SIRTAKI_API at::Tensor whole_of(const at::Tensor& parameter);

// Lets `fill` write the whole tensor, and keeps this rank's part of it: for initialising by one's own
// rule. A parameter that is not split is written itself. Not collective.
//
//   sirtaki::fill_whole(layer->weight, [](at::Tensor whole) { whole.normal_(0, 0.02); });
SIRTAKI_API void fill_whole(const at::Tensor& parameter,
                            const std::function<void(at::Tensor)>& fill);

// Returns the parameters and buffers of the module by their names, split ones as wholes: what the
// unsplit module has. They are copies and take no part in autograd. Each goes to `device`, if one is
// given, before the next one is gathered: the CPU holds what a GPU cannot. Collective over the sets of the
// split layers.
SIRTAKI_API torch::OrderedDict<std::string, at::Tensor> whole_state(
    const torch::nn::Module& module, std::optional<at::Device> device = std::nullopt);

// Overwrites parameters and buffers of the module with those of the unsplit module, of which each
// rank takes its parts. Throws InvalidArgument, and changes nothing, if names or shapes do not fit.
// Not collective.
SIRTAKI_API void load_whole_state(torch::nn::Module& module,
                                  const torch::OrderedDict<std::string, at::Tensor>& state);

}  // namespace sirtaki
