#include "frameworks/torch/gradients/parameter_gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "core/threads/callers.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/sparse_call.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/gradient_form.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "session/session_observability.h"

namespace sirtaki::detail {

using torch::autograd::variable_list;

namespace {

// Hooks stay in the graph of whoever keeps it alive, longer than the optimizer, and then do nothing.
// The optimizer's end takes none out: autograd may be running this very hook on another thread, or on
// this one if it held the last reference to the gradient.
template <class Base>
struct GradientHook : Base {
  explicit GradientHook(std::weak_ptr<ParameterGradient> to) : gradient(std::move(to)) {}
  const std::weak_ptr<ParameterGradient> gradient;
};

// The tensor keeps this one, and autograd calls it before any node that writes the gradient: one that
// came with other data, or when the parameter was unfrozen, has no hooks yet. torch::autograd::grad
// calls it as well, which writes none.
struct NodeHook : GradientHook<torch::autograd::FunctionPreHook> {
  using GradientHook::GradientHook;
  variable_list operator()(const variable_list& gradients) override {
    if (const auto alive = gradient.lock()) alive->HookNode();
    return gradients;
  }
};

struct BeforeHook : GradientHook<torch::autograd::FunctionPreHook> {
  using GradientHook::GradientHook;
  variable_list operator()(const variable_list& gradients) override {
    if (const auto alive = gradient.lock()) alive->OnAccumulate();
    return gradients;
  }
};

struct AfterHook : GradientHook<torch::autograd::FunctionPostHook> {
  using GradientHook::GradientHook;
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    const auto alive = gradient.lock();
    if (alive) alive->OnGradient(inputs.empty() ? at::Tensor() : inputs.front());
    return outputs;
  }
};

constexpr const char* kNoSecondBackward =
    "holds an average, to which another backward() would add: with op Sum, compression or a hook "
    "that cannot be averaged again. Let the passes add up in no_sync() or by "
    "backward_passes_per_step, call zero_grad() between them, or average in step(), by average_at";

constexpr const char* kHooksLate =
    "was made by a backward() that the optimizer could not see, since the parameter was added, or "
    "got a hook of the program's, behind zero_grad() of the optimizer: it was not averaged there, "
    "and the program may have clipped it since. Call that zero_grad() before backward(), or "
    "synchronize() of the optimizer right after it";

// Whether others may read or write the memory of this `.grad`. Known not to is the engine, which
// gives up `incoming` after its hooks, and what that alone is a view of.
bool SharesMemory(const at::Tensor& found, const at::Tensor& incoming) {
  if (!found.has_storage()) return false;
  std::size_t known = 1;
  if (incoming.defined() && incoming.has_storage() && !incoming.is_same(found) &&
      incoming.is_alias_of(found)) {
    ++known;
    if (incoming.is_view()) {
      if (incoming._base().use_count() > 1) return true;
      ++known;
    }
  }
  return found.storage().use_count() > known;
}

}  // namespace

ParameterGradient::ParameterGradient(Description description, SessionSet set)
    : what_(std::move(description)),
      set_(std::move(set)),
      gate_(what_.rule->passes, what_.counts->gates) {}

ParameterGradient::~ParameterGradient() { Clear(); }

void ParameterGradient::Attach() {
  if (!what_.rule->of_steps()) HookTensor();
  if (!what_.parameter.requires_grad()) return;
  takes_part_ = true;
  if (!what_.rule->of_steps() && HookNode()) NoteHooksLate();
}

void ParameterGradient::NoteHooksLate() {
  const at::Tensor& gradient = what_.parameter.grad();
  hooks_late_ = gradient.defined() && !history_.Holds(gradient);
}

// A program's first hook at the tensor takes out those that are there.
void ParameterGradient::HookTensor() {
  torch::autograd::impl::materialize_autograd_meta(what_.parameter);
  auto& hooks = torch::autograd::impl::hooks(what_.parameter);
  const auto is_of = [](const auto& hook, const ParameterGradient* gradient) {
    const auto* const of_node = dynamic_cast<const NodeHook*>(hook.get());
    return of_node != nullptr && of_node->gradient.lock().get() == gradient;
  };
  const auto is_own = [&](const auto& hook) { return is_of(hook, this); };
  if (std::any_of(hooks.begin(), hooks.end(), is_own)) return;
  // Programs may make optimizers again and again.
  std::erase_if(hooks, [&](const auto& hook) { return is_of(hook, nullptr); });
  hooks.push_back(std::make_unique<NodeHook>(weak_from_this()));
}

bool ParameterGradient::HookNode() {
  auto node = torch::autograd::impl::grad_accumulator(what_.parameter);
  const std::lock_guard<std::mutex> lock(node_mutex_);
  if (node == node_ || !node) return false;
  node->add_pre_hook(std::make_unique<BeforeHook>(weak_from_this()));
  node->add_post_hook(std::make_unique<AfterHook>(weak_from_this()));
  return std::exchange(node_, std::move(node)) != nullptr;
}

// A parameter may have been unfrozen, or have got another node.
void ParameterGradient::BeginStep() {
  gate_.Reset();
  Attach();
  history_.ForgetAverage();
  hooks_late_ = false;
}

core::Status ParameterGradient::Refused(const std::string& text) const {
  return core::Status(core::StatusCode::kInvalidArgument, text,
                      core::Origin{set_.session->topology().rank, "", what_.key});
}

void ParameterGradient::ThrowWrittenAgain() const {
  ThrowStatus(Refused("backward() met the gradient of " + core::Quoted(what_.name) +
                      " while it is being reduced: " +
                      (what_.rule->of_module
                           ? "an earlier backward() of the module has failed or is still running; "
                             "call forward() of the module, which ends it, before the next"
                       : what_.rule->at_backward
                           ? "an earlier backward() has thrown, and zero_grad() of the optimizer "
                             "was not called since; or another one is still running, and an "
                             "optimizer takes one at a time"
                           : "call step() or synchronize() on the optimizer between two "
                             "backward(), and zero_grad() after that; to accumulate, declare it "
                             "with backward_passes_per_step or no_sync()")));
}

void ParameterGradient::AddOwner(std::weak_ptr<AveragedAtEnd> owner) {
  const std::shared_ptr<const Owners> before = owners_;
  auto owners = std::make_shared<Owners>();
  if (before) {
    for (const auto& known : *before) {
      if (!known.expired()) owners->push_back(known);
    }
  }
  const auto mine = owner.lock();
  for (const auto& known : *owners) {
    if (known.lock() == mine) return;
  }
  owners->push_back(std::move(owner));
  owners_ = std::shared_ptr<const Owners>(std::move(owners));
}

void ParameterGradient::JoinEnds() const {
  const std::shared_ptr<const Owners> owners = owners_;
  if (!owners) return;
  for (const auto& owner : *owners) {
    const auto alive = owner.lock();
    if (!alive) continue;
    if (!set_.session->backward_ends().Join(alive, what_.parameter.is_cpu())) {
      ThrowStatus(Refused("backward() met the gradient of " + core::Quoted(what_.name) +
                          " while another thread runs a backward() of the same optimizer: one at "
                          "a time, or average_at Step"));
    }
  }
}

// An average of this step is there already, whatever the program has made of it.
bool ParameterGradient::IsLaterAverage() const {
  const std::uint32_t round = what_.counts->round.load();
  return !what_.rule->of_module && !shared_ && round > 1 && round < kRoundInStep;
}

// Before the node adds to memory that the reduction is reading.
void ParameterGradient::OnAccumulate() {
  if (set_.session->gone()) return;
  takes_part_ = true;  // it may have been unfrozen since Attach
  const bool counts = what_.rule->at_backward && !gate_.held();
  if (counts) JoinEnds();
  if (gate_.reported()) ThrowWrittenAgain();
  const at::Tensor& gradient = what_.parameter.grad();
  const bool once_only = what_.rule->at_backward && !what_.rule->may_repeat();
  const bool adds = history_.BeginPass(gradient, IsLaterAverage(), /*also_changed=*/once_only);
  if (!adds || !once_only) return;
  const bool is_zeroed = gradient.is_sparse() ? gradient._nnz() == 0
                                              : gradient.count_nonzero().item<std::int64_t>() == 0;
  if (is_zeroed) return history_.ForgetAverage();
  if (counts) {
    ThrowStatus(Refused("the gradient of " + core::Quoted(what_.name) + " " + kNoSecondBackward));
  }
}

void ParameterGradient::OnGradient(const at::Tensor& incoming) {
  // The optimizer says so in step(); a later session's may be at work on the same parameter.
  if (set_.session->gone()) return;
  ++writes_;
  set_.session->session().observation().steps().NoteGradient();
  switch (gate_.Arrive()) {
    case fusion::GradientGate::Arrival::kEarly:
      return history_.EndPass(what_.parameter.grad());
    case fusion::GradientGate::Arrival::kInFlight:
      ThrowWrittenAgain();
    case fusion::GradientGate::Arrival::kReport:
      break;
  }
  // That of a GPU is met by a thread of autograd's.
  std::optional<core::ServingThread> serving;
  if (!what_.parameter.is_cpu()) serving.emplace();
  Submit(/*will_wait=*/false, incoming);
}

void ParameterGradient::Share() {
  if (!std::exchange(shared_, true)) ++what_.counts->shared;
}

void ParameterGradient::TakeOut() {
  const BucketPartPtr part = part_;
  if (part && !part->bucket->assembly.of_one()) part->bucket->TakeApart();
}

std::vector<std::shared_ptr<ParameterGradient>> ParameterGradient::BucketMates() const {
  std::vector<std::shared_ptr<ParameterGradient>> mates;
  const BucketPartPtr part = part_;
  if (!part || !part->bucket->goes_on()) return mates;
  for (const BucketPart& each : part->bucket->parts) {
    if (auto alive = each.gradient.lock()) mates.push_back(std::move(alive));
  }
  return mates;
}

void ParameterGradient::Submit(bool will_wait, const at::Tensor& incoming, bool stays) {
  UnderWay& now = Begin();
  now.present = now.found.defined() && what_.parameter.requires_grad() && !stays;
  now.shares = now.found.defined() && SharesMemory(now.found, incoming);
  if (now.present) {
    seen_.order = what_.counts->ready.fetch_add(1, std::memory_order_relaxed);
    seen_.stays_out = now.found.is_sparse() && !what_.rule->sparse_as_dense;
    seen_.dense |= !seen_.stays_out;
  }
  now.refused = WhyNotAveraged();
  Start(will_wait);
}

void ParameterGradient::SubmitMissing(bool averaged, bool in_step) {
  if (in_step && hooks_late_) return Refuse(kHooksLate, /*threw=*/false);
  const bool touched = gate_.touched();  // in no_sync()
  const bool once_only =
      history_.EndPasses(what_.parameter.grad(), touched, averaged) && !what_.rule->may_repeat();
  if (once_only && touched && what_.rule->at_backward) {
    return Refuse(kNoSecondBackward, /*threw=*/false);
  }
  Submit(/*will_wait=*/true, {}, /*stays=*/once_only && !touched);
}

void ParameterGradient::RefuseAfterThrow() {
  Refuse("its backward() has thrown, which its error explains; zero_grad() begins again",
         /*threw=*/true);
}

void ParameterGradient::Refuse(std::string why, bool threw) {
  UnderWay& now = Begin();
  now.refused = std::move(why);
  now.threw = threw;
  Start(/*will_wait=*/false);
}

ParameterGradient::UnderWay& ParameterGradient::Begin() {
  UnderWay& now = under_way_.emplace();
  now.found = what_.parameter.grad();
  now.round = what_.counts->round.load();
  seen_ = {.dense = seen_.dense};
  return now;
}

std::string ParameterGradient::WhyNotAveraged() const {
  if (!what_.rule->at_backward || !under_way_->present || !under_way_->found.requires_grad()) {
    return {};
  }
  return "it is differentiable itself (backward with create_graph), and its average would lose "
         "that "
         "graph: compute it by torch::autograd::grad, or average in step(), by average_at of "
         "DistributedOptimizer";
}

bool ParameterGradient::MovesSparse() const {
  if (!under_way_->refused.empty()) return false;
  if (what_.rule->sparse_as_dense || what_.rule->hook) return false;
  return under_way_->present ? under_way_->found.is_sparse() : sparse_dims_ > 0;
}

// Hands it to its bucket, or to one of its own.
void ParameterGradient::Start(bool will_wait) {
  if (under_way_->found.defined()) under_way_->version = VersionOf(under_way_->found);
  if (what_.rule->alone) return;
  at::NoGradGuard no_grad;
  BucketPartPtr part = part_;
  const bool together = part && part->bucket->goes_on();
  if (!together && MovesSparse()) {
    part_ = BucketPartPtr();  // with what memory a former bucket had
    return StartSparse(will_wait);
  }
  StartDense(together ? std::move(part) : nullptr, will_wait);
}

// A gradient that does not fit makes the request of the whole bucket invalid: all ranks take the
// bucket apart.
void ParameterGradient::StartDense(BucketPartPtr part, bool will_wait) {
  using Arrival = fusion::BucketAssembly::Arrival;
  UnderWay& now = *under_way_;
  const bool as_found = now.present && !(what_.rule->sparse_as_dense && now.found.is_sparse());
  const at::Tensor& shaped = as_found ? now.found : what_.parameter;
  const bool together = part != nullptr;
  std::string invalid = Check(shaped);
  if (!together) part = PartAlone(shaped);
  Bucket& bucket = *part->bucket;
  core::Work& work = part->Renew(IsOnGpu(shaped));
  if (!now.present) work.request.absent = {true};
  if (now.threw) work.request.asked = core::Refusal{};
  if (part->on_gpu() != nullptr && gpu_ && (invalid.empty() || bucket.hook)) {
    std::string noted = NoteOnGpu(*part->on_gpu());
    if (invalid.empty()) invalid = std::move(noted);
  }
  if (invalid.empty() && together) invalid = CheckInBucket(*part, shaped);
  // The hooks of the other ranks wait for this one's all the same, which then brings zeros.
  if (bucket.hook && !invalid.empty()) now.present = false;
  if (invalid.empty() || bucket.hook) {
    std::string no_memory = TryGiveMemory(*part);
    if (bucket.hook && !no_memory.empty()) bucket.hook->Fail(no_memory);
    if (invalid.empty()) invalid = std::move(no_memory);
  }
  if (together && !invalid.empty()) {
    invalid = "the gradient of " + core::Quoted(what_.name) + ": " + invalid;
  }
  work.request.invalid = std::move(invalid);
  const Arrival arrival = bucket.assembly.Put(part->index, part->work);
  if (arrival == Arrival::kInFlight) ThrowWrittenAgain();
  now.is_put = true;
  if (arrival == Arrival::kEarly) return;
  if (!bucket.hook) return Launch(bucket, will_wait);
  const std::shared_ptr<HookLine> line = bucket.hook->line;
  if (!line) return;  // LaunchAlone
  line->line.Complete(static_cast<std::size_t>(bucket.hook->given.index), [&](std::size_t next) {
    if (const auto alive = line->buckets[next].lock()) Launch(*alive, will_wait);
  });
}

// Launches a bucket that is complete, which with a hook may be another than this gradient's.
void ParameterGradient::Launch(Bucket& bucket, bool will_wait) {
  if (bucket.hook) bucket.hook->Call(bucket);
  const core::WorkPtr whole = bucket.assembly.Assemble(under_way_->round);
  // Later than their hooks might, but once for all of them.
  const bool on_gpu = gpu_ && bucket.parts.front().on_gpu() != nullptr;
  if (!bucket.hook && on_gpu && whole->request.invalid.empty()) {
    core::Status noted = NoteReadyInStreams(bucket.assembly.parts(), *gpu_);
    if (noted.ok()) noted = NoteVacant(bucket.assembly.parts(), *gpu_);
    whole->request.invalid = noted.message();
  }
  ThrowIfError(set_.session->Submit(whole, will_wait));
  bucket.assembly.NoteSubmitted(whole);
  // On a GPU a bucket ends long after its launch, and nothing is taken before: a hook that waited would
  // only keep the backward pass from launching more.
  if (what_.counts->shards && !bucket.hook && !on_gpu) {
    TakeShardsOfDone(std::shared_ptr<Bucket>(part_.load(), &bucket), /*may_wait=*/!will_wait);
  }
}

void ParameterGradient::LaunchAlone() {
  if (!under_way_ || !under_way_->is_put || handle()) return;
  Bucket& bucket = *part_.load()->bucket;
  if (bucket.hook && !bucket.hook->line) Launch(bucket, /*will_wait=*/true);
}

// One grouped all-gather of indices and values.
void ParameterGradient::StartSparse(bool will_wait) {
  at::Tensor mine = under_way_->found;
  if (!under_way_->present) {
    // No entries. What it is must fit, what the others have decides its form.
    const auto sizes = what_.parameter.sizes();
    std::vector<std::int64_t> values = {0};
    values.insert(values.end(), sizes.begin() + sparse_dims_, sizes.end());
    const auto like = what_.parameter.options();
    mine = at::sparse_coo_tensor(at::empty({sparse_dims_, 0}, like.dtype(at::kLong)),
                                 at::empty(values, like), sizes);
  }
  const bool is_average = what_.rule->reduction == core::ReduceOp::kAverage;
  const auto options = AllreduceOptions()
                           .name(what_.key)
                           .op(is_average ? ReduceOp::Average : ReduceOp::Sum)
                           .prescale(1.0 / what_.rule->predivide)
                           .postscale(what_.rule->predivide)
                           .process_set(set_.process_set);
  under_way_->sparse =
      detail::StartSparse(mine, options, will_wait, set_.session, under_way_->round);
}

}  // namespace sirtaki::detail
