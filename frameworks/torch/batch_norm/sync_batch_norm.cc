#include "sirtaki/sync_batch_norm.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "frameworks/torch/batch_norm/sync_batch_norm_gpu.h"
#include "frameworks/torch/batch_norm/sync_batch_norm_impl.h"
#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

using detail::BatchShare;
using detail::SyncBatchNormCall;
using detail::SyncBatchNormCalls;
using detail::SyncBatchNormTensors;

// What a rank tells the others in forward(), on the CPU in front of its means and squares. All of it
// is 0 in the row of a rank that has joined, if that has a row.
enum NormField : std::int64_t {
  kRankAndOne,
  kCount,
  kNumber,
  kHasGraph,
  kNeedsGradient,
  kNormFieldCount
};

SyncBatchNormTensors NewTensors(const torch::nn::BatchNormOptions& options) {
  SyncBatchNormTensors tensors;
  if (options.affine()) {
    tensors.weight = at::ones({options.num_features()}).requires_grad_();
    tensors.bias = at::zeros({options.num_features()}).requires_grad_();
  }
  if (options.track_running_stats()) {
    tensors.running_mean = at::zeros({options.num_features()});
    tensors.running_var = at::ones({options.num_features()});
    tensors.num_batches_tracked = at::zeros({}, at::kLong);
  }
  return tensors;
}

// Empty if the input fits.
std::string WhyRefused(const at::Tensor& input, const at::Tensor& weight,
                       const at::Tensor& running_mean, std::int64_t channels) {
  std::string why = detail::WhyNotMovable(input);
  if (!why.empty()) return why;
  const std::string what = "the input is " + detail::TypeAndShape(input);
  if (!input.is_floating_point()) {
    return what + "; supported are float16, bfloat16, float32 and float64";
  }
  if (input.dim() < 2 || input.size(1) != channels) {
    return what + "; its shape must be [N, " + std::to_string(channels) + ", ...]";
  }
  const auto type = input.scalar_type();
  if (weight.defined() && weight.scalar_type() != type &&
      weight.scalar_type() != detail::ComputingType(type)) {
    return what + ", but the weight is " + detail::TypeAndShape(weight);
  }
  for (const at::Tensor& own : {weight, running_mean}) {
    if (!own.defined() || own.device() == input.device()) continue;
    return c10::str("the input is on ", input.device(), ", but the module is on ", own.device());
  }
  return {};
}

[[noreturn]] void Refuse(core::StatusCode code, const std::string& key, const std::string& why) {
  detail::ThrowStatus(core::Status(code, "\"" + key + "\": " + why));
}

[[noreturn]] void RefuseSingle(const std::string& key) {
  Refuse(core::StatusCode::kInvalidArgument, key,
         "the batches of all ranks together have a single value per channel; training needs more "
         "than one");
}

// Throws on every rank if they do not all have a gradient to compute, or all none: some would wait
// for the others in backward().
void CheckGraphs(const at::Tensor& rows, const std::string& key) {
  std::vector<std::string> graphs;
  std::vector<int> ranks;
  bool equal = true;
  for (std::int64_t row = 0; row < rows.size(0); ++row) {
    const int rank = static_cast<int>(rows[row][kRankAndOne].item<double>()) - 1;
    if (rank < 0) continue;
    ranks.push_back(rank);
    const bool has_graph = rows[row][kHasGraph].item<double>() != 0;
    graphs.emplace_back(has_graph ? "a gradient to compute" : "none");
    equal &= graphs.back() == graphs.front();
  }
  if (equal) return;
  Refuse(core::StatusCode::kMismatch, key,
         detail::GroupsText(graphs, ranks) +
             "; the input or the parameters must require a gradient on all ranks or on none, and "
             "the grad mode must be the same");
}

// What a rank tells of its batch [N, C, ...].
at::Tensor Tell(const at::Tensor& input, int rank, std::int64_t number, bool has_graph,
                bool needs_gradient) {
  at::Tensor told = at::empty({kNormFieldCount}, at::kDouble);
  auto* values = told.mutable_data_ptr<double>();
  values[kCount] = static_cast<double>(input.size(0));
  for (std::int64_t d = 2; d < input.dim(); ++d) {
    values[kCount] *= static_cast<double>(input.size(d));
  }
  values[kRankAndOne] = rank + 1;
  values[kNumber] = static_cast<double>(number);
  values[kHasGraph] = has_graph ? 1 : 0;
  values[kNeedsGradient] = needs_gradient ? 1 : 0;
  return told;
}

// All that all ranks have to know of each other. What a GPU computes stays there.
detail::TensorCall GatherOf(const at::Tensor& input, const at::Tensor& told, double eps) {
  detail::TensorCall gather;
  if (input.is_cuda()) {
    gather.kind = core::OpKind::kAllGatherInto;
    gather.grouped = true;
    gather.group = {told.unsqueeze(0), detail::GpuRow(input, eps)};
    return gather;
  }
  const at::Tensor x = input.detach().to(detail::ComputingType(input.scalar_type()));
  const BatchShare share = detail::ShareOf(x.contiguous(x.suggest_memory_format()));
  gather.tensor = at::cat({told, share.mean, share.squares}).unsqueeze(0);
  return gather;
}

// What all ranks have told; throws on every rank if that cannot be trained on.
c10::intrusive_ptr<SyncBatchNormCall> JoinTold(const at::Tensor& rows, const std::string& key,
                                               const detail::SessionSet& set) {
  CheckGraphs(rows, key);
  auto call = c10::make_intrusive<SyncBatchNormCall>(set);
  call->key = key;
  for (std::int64_t row = 0; row < rows.size(0); ++row) {
    const auto* told = rows.const_data_ptr<double>() + row * rows.stride(0);
    // The number is the first rank's: others may have made fewer calls, before they joined.
    if (told[kRankAndOne] != 0 && call->ranks++ == 0) {
      call->number = static_cast<std::int64_t>(told[kNumber]);
    }
    call->reduces |= told[kNeedsGradient] != 0;
    call->count_of_rank.push_back(told[kCount]);
    call->batch.count += told[kCount];
  }
  if (call->batch.count == 1) RefuseSingle(key);
  return call;
}

// The means and squares behind what was told.
void JoinShares(const at::Tensor& rows, SyncBatchNormCall& call) {
  const std::int64_t channels = (rows.size(1) - kNormFieldCount) / 2;
  std::vector<BatchShare> shares;
  for (std::int64_t rank = 0; rank < rows.size(0); ++rank) {
    shares.push_back({call.count_of_rank[static_cast<std::size_t>(rank)],
                      rows[rank].narrow(0, kNormFieldCount, channels),
                      rows[rank].narrow(0, kNormFieldCount + channels, channels)});
  }
  call.batch = detail::Join(shares);
  call.variance = call.batch.squares / std::max(call.batch.count, 1.0);
}

std::optional<at::Tensor> IfDefined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// Moves `running` towards `value`.
void Follow(const at::Tensor& running, const at::Tensor& value, double factor) {
  at::NoGradGuard no_grad;
  running.mul_(1 - factor).add_(value.to(running.scalar_type()), factor);
}

}  // namespace

namespace detail {

SessionSet SyncBatchNormCalls::Enter() {
  SessionSet set(StateOf(given_), process_set_);
  ThrowIfError(set.session->Check());
  if (entered_.lock() == set.session) return set;
  const int which = set.session->NextModuleNumber(set.members.set, name_);
  key_ = "sync_batch_norm/" + name_;
  if (name_.empty() || which > 1) key_ += "#" + std::to_string(which);
  number = 0;
  entered_ = set.session;
  return set;
}

}  // namespace detail

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options_,
                                     const ProcessSet& process_set, const std::string& call_name)
    : options(options_), calls_(std::make_shared<SyncBatchNormCalls>(process_set, call_name)) {
  Register(NewTensors(options));
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options_,
                                     const SyncBatchNormTensors& tensors,
                                     const ProcessSet& process_set, const std::string& call_name)
    : options(options_), calls_(std::make_shared<SyncBatchNormCalls>(process_set, call_name)) {
  Register(tensors);
}

void SyncBatchNormImpl::Register(const SyncBatchNormTensors& tensors) {
  const auto parameter = [this](const char* name, const at::Tensor& tensor) {
    return register_parameter(name, tensor, tensor.defined() && tensor.requires_grad());
  };
  weight = parameter("weight", tensors.weight);
  bias = parameter("bias", tensors.bias);
  running_mean = register_buffer("running_mean", tensors.running_mean);
  running_var = register_buffer("running_var", tensors.running_var);
  num_batches_tracked = register_buffer("num_batches_tracked", tensors.num_batches_tracked);
}

// Called by clone() on a copy whose tables of tensors are empty, and by nobody else: the copy's
// calls are its own.
void SyncBatchNormImpl::reset() {
  calls_ = calls_->Anew();
  Register(NewTensors(options));
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!running_mean.defined()) return;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

void SyncBatchNormImpl::reset_parameters() {
  reset_running_stats();
  if (!weight.defined()) return;
  at::NoGradGuard no_grad;
  weight.fill_(1);
  bias.zero_();
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  std::ostringstream momentum;
  if (options.momentum()) {
    momentum << *options.momentum();
  } else {
    momentum << "None";
  }
  const auto word = [](bool value) { return value ? "true" : "false"; };
  stream << "sirtaki::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ", momentum=" << momentum.str() << ", affine=" << word(options.affine())
         << ", track_running_stats=" << word(options.track_running_stats()) << ')';
}

// Counts it, and gives the weight that it has in the running statistics.
double SyncBatchNormImpl::CountBatch() {
  if (num_batches_tracked.defined()) num_batches_tracked += 1;
  if (options.momentum()) return *options.momentum();
  return num_batches_tracked.defined() ? 1.0 / num_batches_tracked.item<double>() : 0.0;
}

at::Tensor SyncBatchNormImpl::ForwardAlone(const at::Tensor& input, bool by_batch) {
  const double momentum = is_training() ? CountBatch() : 0.0;
  return at::batch_norm(input, weight, bias, running_mean, running_var, by_batch, momentum,
                        options.eps(), at::globalContext().userEnabledCuDNN());
}

// Follows the batch as on the CPU, except that nothing is asked of the GPU.
void SyncBatchNormImpl::FollowOnGpu(const at::Tensor& rows, detail::SyncBatchNormCall& call) {
  if (num_batches_tracked.defined()) num_batches_tracked += 1;
  if (!running_mean.defined() || call.batch.count == 0) {
    detail::JoinGpuRows(rows, {}, {}, 0.0, call);
    return;
  }
  if (options.momentum() && running_mean.scalar_type() == rows.scalar_type()) {
    detail::JoinGpuRows(rows, running_mean, running_var, *options.momentum(), call);
    return;
  }
  const at::Tensor mean = at::zeros({options.num_features()}, rows.options());
  const at::Tensor variance = at::zeros_like(mean);
  detail::JoinGpuRows(rows, mean, variance, /*momentum=*/1.0, call);
  for (const auto& [running, value] :
       {std::pair(running_mean, mean), std::pair(running_var, variance)}) {
    if (options.momentum()) {
      Follow(running, value, *options.momentum());
    } else {
      running.add_((value.to(running.scalar_type()) - running) / num_batches_tracked);
    }
  }
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  if (!is_training()) return ForwardAlone(input, !running_mean.defined());
  const detail::SessionSet set = calls_->Enter();
  const std::string& key = calls_->key();
  const std::int64_t channels = options.num_features();
  std::string why = WhyRefused(input, weight, running_mean, channels);
  if (set.size() == 1) {
    if (!why.empty()) Refuse(core::StatusCode::kInvalidArgument, key, why);
    if (input.numel() == channels) RefuseSingle(key);
    return ForwardAlone(input, true);
  }

  detail::TensorCall gather;
  if (why.empty()) {
    try {
      const bool graph = at::GradMode::is_enabled();
      const auto needs = [graph](const at::Tensor& tensor) {
        return graph && tensor.defined() && tensor.requires_grad();
      };
      gather = GatherOf(input,
                        Tell(input, set.session->topology().rank, calls_->number,
                             needs(input) || needs(weight) || needs(bias), needs(input)),
                        options.eps());
    } catch (const std::exception& failure) {
      why = detail::WhyNoMemory(failure);
    }
  }
  if (!gather.grouped) gather.kind = core::OpKind::kAllGather;
  gather.name = key;
  gather.process_set = set.process_set;
  gather.will_wait = true;
  gather.invalid = why;
  const std::vector<at::Tensor> gathered =
      detail::PendingTensor::Start(std::move(gather), set.session)->Results();

  auto call = JoinTold(gathered[0], key, set);
  call->eps = options.eps();
  calls_->number = call->number + 1;
  if (gathered.size() > 1) {
    FollowOnGpu(gathered[1], *call);
  } else {
    JoinShares(gathered[0], *call);
    const double factor = CountBatch();
    if (running_mean.defined() && call->batch.count > 0) {
      Follow(running_mean, call->batch.mean, factor);
      Follow(running_var, call->batch.squares / (call->batch.count - 1), factor);
    }
  }
  return detail::SyncBatchNormFunction::apply(input, IfDefined(weight), IfDefined(bias), call);
}

}  // namespace sirtaki
