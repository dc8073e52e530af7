#include "sirtaki/tensor_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <optional>
#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/parallel/tensor_parallel_calls.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace detail {
namespace {

ParallelCallsPtr CallsOf(const std::string& kind, const std::string& name, const SessionSet& set,
                         const parallel::Split& split, int number) {
  auto calls = std::make_shared<ParallelCalls>(ParallelCalls{kind, name, set, {}, {}});
  calls->key = kind + " " + name + "#" + std::to_string(number);
  for (std::int64_t dim : {0, 1}) {
    calls->along[dim] = std::make_shared<TensorSplit>(TensorSplit{set, calls->key, dim, split});
  }
  return calls;
}

int NextNumber(const SessionSet& set) {
  return set.session->NextModuleNumber(set.members.set, "a split layer");
}

// The tensor as autocast would give it to an operator; where there is none, the tensor itself. Our own
// nodes are no operators that autocast knows.
at::Tensor Casted(const at::Tensor& tensor, std::optional<at::ScalarType> type = std::nullopt) {
  if (!tensor.defined()) return tensor;
  const at::DeviceType device = tensor.device().type();
  if (!at::autocast::is_autocast_available(device) || !at::autocast::is_autocast_enabled(device)) {
    return tensor;
  }
  return at::autocast::cached_cast(type.value_or(at::autocast::get_autocast_dtype(device)), tensor,
                                   device);
}

// The layer's name is in the text: a column layer throws on this rank alone.
void CheckFeatures(const at::Tensor& input, std::int64_t features, const ParallelCalls& calls,
                   bool whole_is_given = false) {
  if (input.dim() == 0 || input.size(-1) == features) return;
  const bool is_whole = !whole_is_given && input.size(-1) == calls.split().split.size;
  ThrowInvalid(calls.key + ": its input has " + std::to_string(input.size(-1)) +
               " features in the last dimension, and has to have " + std::to_string(features) +
               (is_whole ? ", this rank's part; input_is_parallel(false), in Python "
                           "input_is_parallel=False, takes that part of all of them"
                         : ""));
}

std::optional<at::Tensor> GivenBias(const at::Tensor& bias) {
  return bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt;
}

}  // namespace

ParallelLayer::ParallelLayer(const std::string& kind, const std::string& name,
                             const ProcessSet& process_set, const Size& size,
                             std::vector<std::string> options) {
  const SessionSet set = SetOf(process_set);
  ThrowIfError(set.session->Check());
  const parallel::Split split = {size.size, size.blocks, size.unit, set.size()};
  const core::Status sized = parallel::CheckSplit(split, size.what);
  options.insert(options.begin(),
                 {std::string(size.what) + " " + std::to_string(size.size),
                  "blocks " + std::to_string(size.blocks), "unit " + std::to_string(size.unit)});
  // A copy that only some ranks have made would let the calls of later layers wait for ever.
  const int number = NextNumber(set);
  options.push_back("place " + std::to_string(number) +
                    " among the split layers of its set, which all ranks make and copy alike");
  const std::string called = name.empty() ? kind : kind + " " + core::Quoted(name);
  for (std::string& option : options) option = called + " with " + option;
  AgreeOnList("a split layer", options, sized.ok() ? "" : called + ": " + sized.message(), set);
  calls_ = CallsOf(kind, name, set, split, number);
}

ParallelLayer ParallelLayer::Anew() const {
  return ParallelLayer(CallsOf(calls_->kind, calls_->name, calls_->set, calls_->split().split,
                               NextNumber(calls_->set)));
}

int ParallelLayer::ranks() const { return calls_->ranks(); }
int ParallelLayer::index() const { return calls_->index(); }

at::Tensor ParallelLayer::Part(const at::Tensor& whole, std::int64_t dim) const {
  return TakePart(whole.detach(), *calls_->along[dim], index());
}

at::Tensor ParallelLayer::Common(const at::Tensor& whole) const {
  const at::Tensor common = whole.detach();
  if (ranks() > 1 && !common.is_meta()) {
    BroadcastInPlaceBlocking(common, calls_->set.first(), calls_->key + " whole", calls_->set);
  }
  return common;
}

void ParallelLayer::Mark(const at::Tensor& parameter, std::int64_t dim) const {
  MarkSplit(parameter, calls_->along[dim]);
}

at::Tensor ParallelLayer::Column(const at::Tensor& input, const at::Tensor& weight,
                                 const at::Tensor& bias, bool gather_output) const {
  if (ranks() == 1) return at::linear(input, weight, GivenBias(bias));
  const auto compute = [&] {
    CheckFeatures(input, weight.size(1), *calls_, /*whole_is_given=*/true);
    return ColumnLinear(Casted(input), Casted(weight), GivenBias(Casted(bias)), calls_);
  };
  return gather_output ? GatherOwn(Make(compute), calls_) : compute();
}

at::Tensor ParallelLayer::Row(const at::Tensor& input, const at::Tensor& weight,
                              const at::Tensor& bias, bool input_is_parallel) const {
  if (ranks() == 1) return at::linear(input, weight, GivenBias(bias));
  const Made own = Make([&] {
    if (input_is_parallel) CheckFeatures(input, weight.size(1), *calls_);
    return at::linear(input_is_parallel ? input : Through(Region::kScatter, input, calls_), weight);
  });
  const at::Tensor sum = SumOwn(own, calls_);
  return bias.defined() ? sum.add_(bias.to(sum.scalar_type())) : sum;
}

at::Tensor ParallelLayer::Embed(const at::Tensor& ids, const at::Tensor& weight,
                                std::int64_t padding_idx) const {
  if (ranks() == 1) return at::embedding(weight, ids, padding_idx);
  const Made own = Make([&] {
    const std::int64_t all = calls_->split().split.size;
    if (ids.is_cpu() && ids.numel() > 0) {  // a GPU is not waited for
      const auto [least, most] = at::aminmax(ids);
      for (const std::int64_t id : {least.item<std::int64_t>(), most.item<std::int64_t>()}) {
        if (id >= 0 && id < all) continue;
        ThrowInvalid("id " + std::to_string(id) + " is none of the " + std::to_string(all) +
                     " embeddings");
      }
    }
    const auto [begin, count] = parallel::RangesOf(calls_->split().split, index()).front();
    const at::Tensor absent = (ids < begin).logical_or_(ids >= begin + count);
    const bool pads_here = padding_idx >= begin && padding_idx < begin + count;
    return at::embedding(weight, (ids - begin).masked_fill_(absent, 0),
                         pads_here ? padding_idx - begin : -1)
        .masked_fill_(absent.unsqueeze(-1), 0);
  });
  return SumOwn(own, calls_);
}

at::Tensor ParallelLayer::CrossEntropy(const at::Tensor& logits, const at::Tensor& target,
                                       std::int64_t ignore_index, double label_smoothing,
                                       std::int64_t reduction) const {
  const at::Tensor given = Casted(logits, at::kFloat);
  const at::ScalarType type = given.scalar_type();
  const at::Tensor rows =
      given.dim() < 2 ? given.reshape({1, given.numel()}) : given.flatten(0, -2);
  std::string unlike;
  if (given.dim() > 2 && target.dim() > 1 &&
      target.sizes() != given.sizes().slice(0, given.dim() - 1)) {
    unlike = "the targets are " + TypeAndShape(target) + ", and the logits " + TypeAndShape(given) +
             ": targets are flat, or have the shape of the logits without the last dimension";
    if (ranks() == 1) ThrowInvalid("ParallelCrossEntropy: " + unlike);
  }
  // A sum of losses would soon be infinite in float16.
  const at::Tensor losses =
      ranks() > 1
          ? SplitCrossEntropy(rows, target.flatten(), unlike, calls_, ignore_index, label_smoothing)
          : at::cross_entropy_loss(at::isReducedFloatingType(type) ? rows.to(at::kFloat) : rows,
                                   target.flatten(), {}, at::Reduction::None, ignore_index,
                                   label_smoothing);
  if (reduction == at::Reduction::None) return losses.to(type).view(target.sizes());
  const at::Tensor sum = losses.sum();
  if (reduction == at::Reduction::Sum) return sum.to(type);
  return (sum / (target != ignore_index).sum()).to(type);
}

std::optional<ProcessSet> SplitSetOf(const at::Tensor& parameter) {
  const TensorSplitPtr split = SplitOverRanks(parameter);
  return split ? std::optional(split->set.process_set) : std::nullopt;
}

std::vector<std::int64_t> WholeShapeOf(const at::Tensor& parameter) {
  const TensorSplitPtr split = SplitOf(parameter);
  return split ? WholeSizes(parameter, *split) : parameter.sizes().vec();
}

at::Tensor PartFor(const at::Tensor& parameter, const at::Tensor& whole) {
  const TensorSplitPtr split = SplitOf(parameter);
  return TakePart(whole, *split, split->index());
}

}  // namespace detail

namespace {

using detail::ParallelLayer;

std::string WithBias(bool bias) { return bias ? "a bias" : "no bias"; }
std::string Featured(const char* what, std::int64_t features) {
  return std::string(what) + " " + std::to_string(features);
}
const char* Word(bool value) { return value ? "true" : "false"; }

// The weight and bias of an unsplit layer, drawn as it draws them.
torch::nn::Linear WholeLinear(std::int64_t in, std::int64_t out, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

at::Tensor EmptyLike(const at::Tensor& tensor) { return at::empty_like(tensor.detach()); }

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(const ColumnParallelLinearOptions& options_)
    : options(options_),
      layer_("ColumnParallelLinear", options.name(), options.process_set(),
             {"out_features", options.out_features(), options.blocks(), options.unit()},
             {Featured("in_features", options.in_features()), WithBias(options.bias()),
              std::string("gather_output ") + Word(options.gather_output())}) {
  const auto whole = WholeLinear(options.in_features(), options.out_features(), options.bias());
  weight = register_parameter("weight", layer_.Part(whole->weight, 0));
  layer_.Mark(weight, 0);
  if (!options.bias()) return;
  bias = register_parameter("bias", layer_.Part(whole->bias, 0));
  layer_.Mark(bias, 0);
}

// Called by clone() on a copy whose tables of tensors are empty.
void ColumnParallelLinearImpl::reset() {
  layer_ = layer_.Anew();
  weight = register_parameter("weight", EmptyLike(weight), weight.requires_grad());
  layer_.Mark(weight, 0);
  if (!bias.defined()) return;
  bias = register_parameter("bias", EmptyLike(bias), bias.requires_grad());
  layer_.Mark(bias, 0);
}

void ColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "sirtaki::ColumnParallelLinear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << Word(options.bias())
         << ", gather_output=" << Word(options.gather_output()) << ", part " << layer_.index()
         << " of " << layer_.ranks() << ')';
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& input) {
  return layer_.Column(input, weight, bias, options.gather_output());
}

RowParallelLinearImpl::RowParallelLinearImpl(const RowParallelLinearOptions& options_)
    : options(options_),
      layer_("RowParallelLinear", options.name(), options.process_set(),
             {"in_features", options.in_features(), 1, options.unit()},
             {Featured("out_features", options.out_features()), WithBias(options.bias()),
              std::string("input_is_parallel ") + Word(options.input_is_parallel())}) {
  const auto whole = WholeLinear(options.in_features(), options.out_features(), options.bias());
  weight = register_parameter("weight", layer_.Part(whole->weight, 1));
  layer_.Mark(weight, 1);
  if (options.bias()) bias = register_parameter("bias", layer_.Common(whole->bias));
}

void RowParallelLinearImpl::reset() {
  layer_ = layer_.Anew();
  weight = register_parameter("weight", EmptyLike(weight), weight.requires_grad());
  layer_.Mark(weight, 1);
  if (bias.defined()) {
    bias = register_parameter("bias", EmptyLike(bias), bias.requires_grad());
  }
}

void RowParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << "sirtaki::RowParallelLinear(in_features=" << options.in_features()
         << ", out_features=" << options.out_features() << ", bias=" << Word(options.bias())
         << ", input_is_parallel=" << Word(options.input_is_parallel()) << ", part "
         << layer_.index() << " of " << layer_.ranks() << ')';
}

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& input) {
  return layer_.Row(input, weight, bias, options.input_is_parallel());
}

ParallelEmbeddingImpl::ParallelEmbeddingImpl(const ParallelEmbeddingOptions& options_)
    : options(options_),
      layer_("ParallelEmbedding", options.name(), options.process_set(),
             {"num_embeddings", options.num_embeddings(), 1, 1},
             {Featured("embedding_dim", options.embedding_dim()),
              Featured("padding_idx", options.padding_idx().value_or(-1))}) {
  const auto padding = options.padding_idx();
  if (padding && (*padding < 0 || *padding >= options.num_embeddings())) {
    detail::ThrowInvalid("ParallelEmbedding: padding_idx is " + std::to_string(*padding) +
                         "; it has to be at least 0 and below num_embeddings, " +
                         std::to_string(options.num_embeddings()));
  }
  const torch::nn::Embedding whole(
      torch::nn::EmbeddingOptions(options.num_embeddings(), options.embedding_dim())
          .padding_idx(padding));
  weight = register_parameter("weight", layer_.Part(whole->weight, 0));
  layer_.Mark(weight, 0);
}

void ParallelEmbeddingImpl::reset() {
  layer_ = layer_.Anew();
  weight = register_parameter("weight", EmptyLike(weight), weight.requires_grad());
  layer_.Mark(weight, 0);
}

void ParallelEmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "sirtaki::ParallelEmbedding(num_embeddings=" << options.num_embeddings()
         << ", embedding_dim=" << options.embedding_dim() << ", part " << layer_.index() << " of "
         << layer_.ranks() << ')';
}

at::Tensor ParallelEmbeddingImpl::forward(const at::Tensor& ids) {
  return layer_.Embed(ids, weight, options.padding_idx().value_or(-1));
}

at::Tensor ParallelEmbeddingImpl::logits(const at::Tensor& input) {
  return layer_.Column(input, weight, {}, /*gather_output=*/false);
}

ParallelCrossEntropyImpl::ParallelCrossEntropyImpl(const ParallelCrossEntropyOptions& options_)
    : options(options_),
      layer_("ParallelCrossEntropy", options.name(), options.process_set(),
             {"num_classes", options.num_classes(), 1, 1},
             {Featured("reduction", static_cast<std::int64_t>(options.reduction().index())),
              Featured("ignore_index", options.ignore_index()),
              "label_smoothing " + std::to_string(options.label_smoothing())}) {
  if (!(options.label_smoothing() >= 0 && options.label_smoothing() <= 1)) {
    detail::ThrowInvalid("ParallelCrossEntropy: label_smoothing is " +
                         std::to_string(options.label_smoothing()) +
                         "; it has to be between 0 and 1");
  }
}

void ParallelCrossEntropyImpl::reset() { layer_ = layer_.Anew(); }

void ParallelCrossEntropyImpl::pretty_print(std::ostream& stream) const {
  stream << "sirtaki::ParallelCrossEntropy(num_classes=" << options.num_classes() << ", part "
         << layer_.index() << " of " << layer_.ranks() << ')';
}

at::Tensor ParallelCrossEntropyImpl::forward(const at::Tensor& logits, const at::Tensor& target) {
  static_assert(at::Reduction::None == 0 && at::Reduction::Mean == 1 && at::Reduction::Sum == 2);
  return layer_.CrossEntropy(logits, target, options.ignore_index(), options.label_smoothing(),
                             static_cast<std::int64_t>(options.reduction().index()));
}

bool is_split(const at::Tensor& parameter) { return detail::SplitOf(parameter) != nullptr; }

at::Tensor whole_of(const at::Tensor& parameter) {
  const detail::TensorSplitPtr split = detail::SplitOf(parameter);
  return split ? detail::GatherWhole(parameter, *split) : parameter.detach();
}

void fill_whole(const at::Tensor& parameter, const std::function<void(at::Tensor)>& fill) {
  const at::NoGradGuard no_grad;
  if (!is_split(parameter)) return fill(parameter.detach());
  const at::Tensor whole = at::empty(detail::WholeShapeOf(parameter), parameter.options());
  fill(whole);
  parameter.detach().copy_(detail::PartFor(parameter, whole));
}

torch::OrderedDict<std::string, at::Tensor> whole_state(const torch::nn::Module& module,
                                                        std::optional<at::Device> device) {
  torch::OrderedDict<std::string, at::Tensor> state;
  // Tensors that are not split are copied too: the state is that of one moment.
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const at::Tensor whole = whole_of(tensor);
    state.insert(name, whole.to(device.value_or(whole.device()), whole.scalar_type(),
                                /*non_blocking=*/false, /*copy=*/!is_split(tensor)));
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value());
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return state;
}

void load_whole_state(torch::nn::Module& module,
                      const torch::OrderedDict<std::string, at::Tensor>& state) {
  const at::NoGradGuard no_grad;
  auto own = module.named_parameters();
  for (const auto& item : module.named_buffers()) own.insert(item.key(), item.value());
  for (const auto& item : own) {
    const at::Tensor* const given = state.find(item.key());
    const auto sizes = detail::WholeShapeOf(item.value());
    if (given == nullptr) {
      detail::ThrowInvalid("load_whole_state: " + core::Quoted(item.key()) +
                           " is not in the state");
    }
    if (given->sizes() != sizes) {
      detail::ThrowInvalid(
          "load_whole_state: " + core::Quoted(item.key()) + " is " + detail::TypeAndShape(*given) +
          " in the state; its whole here is " +
          detail::TypeAndShape(at::empty(sizes, item.value().options().device(at::kMeta))));
    }
  }
  for (const auto& item : state) {
    if (!own.contains(item.key())) {
      detail::ThrowInvalid("load_whole_state: the module has no " + core::Quoted(item.key()) +
                           ", which is in the state");
    }
  }
  for (const auto& item : own) {
    const at::Tensor& given = state[item.key()];
    item.value().detach().copy_(is_split(item.value()) ? detail::PartFor(item.value(), given)
                                                       : given);
  }
}

}  // namespace sirtaki
