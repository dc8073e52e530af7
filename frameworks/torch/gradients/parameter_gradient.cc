#include "frameworks/torch/gradients/parameter_gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "core/threads/callers.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/sparse_call.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/gradient_form.h"
#include "frameworks/torch/gradients/gradient_memory.h"
#include "frameworks/torch/tensors/compression.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "session/session_observability.h"

namespace sirtaki::detail {

using torch::autograd::variable_list;

// Hooks stay in the graph of whoever keeps it alive, longer than the optimizer or the attachment, and
// then do nothing. They are never taken out: autograd may be running this very hook on another
// thread, or on this one if it held the last reference to the gradient.
template <class Base>
struct GradientHook : Base {
  GradientHook(std::weak_ptr<ParameterGradient> to, std::uint64_t number)
      : gradient(std::move(to)), attachment(number) {}
  void BeforeAccumulate() const {
    if (const auto active = Active()) active->OnAccumulate();
  }
  void AfterAccumulate(const at::Tensor& incoming) const {
    if (const auto active = Active()) active->OnGradient(incoming);
  }
  std::shared_ptr<ParameterGradient> Active() const {
    auto alive = gradient.lock();
    return alive && alive->attachments_ == attachment ? alive : nullptr;
  }
  const std::weak_ptr<ParameterGradient> gradient;
  const std::uint64_t attachment;
};

namespace {

struct BeforeHook : GradientHook<torch::autograd::FunctionPreHook> {
  using GradientHook::GradientHook;
  variable_list operator()(const variable_list& gradients) override {
    BeforeAccumulate();
    return gradients;
  }
};

struct AfterHook : GradientHook<torch::autograd::FunctionPostHook> {
  using GradientHook::GradientHook;
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    AfterAccumulate(inputs.empty() ? at::Tensor() : inputs.front());
    return outputs;
  }
};

constexpr const char* kCaptured =
    "it was made while its stream was captured in a CUDA graph; collectives cannot be replayed, so "
    "call backward() and step() outside of captures";

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
    : what_(std::move(description)), set_(std::move(set)), gate_(what_.rule->passes) {}

ParameterGradient::~ParameterGradient() { Clear(); }

void ParameterGradient::Attach() {
  if (!what_.parameter.requires_grad()) return;
  takes_part_ = true;
  if (what_.rule->of_steps()) return;
  auto accumulator = torch::autograd::impl::grad_accumulator(what_.parameter);
  if (accumulator == accumulator_) return;
  const std::uint64_t attachment = ++attachments_;
  if (accumulator) {
    accumulator->add_pre_hook(std::make_unique<BeforeHook>(weak_from_this(), attachment));
    accumulator->add_post_hook(std::make_unique<AfterHook>(weak_from_this(), attachment));
  }
  accumulator_ = std::move(accumulator);
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

// The program has not changed `.grad` since this noted it last, as far as autograd knows: clipping by
// LibTorch's own functions leaves no trace.
bool ParameterGradient::HoldsAverage() const {
  const at::Tensor& gradient = what_.parameter.grad();
  return average_ && average_->_unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
         VersionOf(gradient) == average_version_;
}

// An average of this step is there already, whatever the program has made of it.
bool ParameterGradient::IsLaterAverage() const {
  const std::uint32_t round = what_.round->load();
  return !what_.rule->of_module && round > 1 && round < kRoundInStep;
}

void ParameterGradient::NoteAverage() {
  average_.reset();
  const at::Tensor& gradient = what_.parameter.grad();
  if (!gradient.defined()) return;
  average_.emplace(gradient.getIntrusivePtr());
  average_version_ = VersionOf(gradient);
}

// Before the node adds to memory that the reduction is reading.
void ParameterGradient::OnAccumulate() {
  const bool fresh = !what_.parameter.grad().defined();
  fresh_.store(fresh, std::memory_order_relaxed);
  if (set_.session->gone()) return;
  const bool counts = what_.rule->at_backward && !gate_.held();
  if (counts) JoinEnds();
  if (gate_.reported()) ThrowWrittenAgain();
  on_average_ = !fresh && (HoldsAverage() || IsLaterAverage());
  if (counts && on_average_ && !what_.rule->may_repeat()) {
    ThrowStatus(Refused("the gradient of " + core::Quoted(what_.name) + " " + kNoSecondBackward));
  }
}

void ParameterGradient::OnGradient(const at::Tensor& incoming) {
  // The optimizer says so in step(); a later session's may be at work on the same parameter.
  if (set_.session->gone()) return;
  set_.session->session().observation().steps().NoteGradient();
  switch (gate_.Arrive()) {
    case fusion::GradientGate::Arrival::kEarly:
      if (on_average_) NoteAverage();  // with what was added
      return;
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

core::Signature ParameterGradient::MakeSignature(const at::Tensor& shaped) const {
  core::Signature signature = Describe(shaped);
  signature.kind = core::OpKind::kAllReduce;
  if (what_.rule->hook) {
    // Nothing is moved: it tells who has the gradient, and that all ranks are ready.
    signature.shape = {0};
    signature.device = core::DeviceKind::kHost;
    return signature;
  }
  if (signature.device == core::DeviceKind::kCuda && gpu_) signature.slot = gpu_->slot();
  signature.reduction = what_.rule->reduction;
  signature.prescale = what_.rule->prescale;
  signature.postscale = what_.rule->postscale;
  signature.wire = WireType(what_.rule->compression, what_.rule->scope, set_.session->topology(),
                            shaped.scalar_type());
  return signature;
}

core::Signature ParameterGradient::ExpectedSignature() {
  (void)FindGpu(what_.parameter);  // its works say what is wrong
  return MakeSignature(what_.parameter);
}

// What the other ranks' hooks have started waits for this one's: there is no going on.
void ParameterGradient::FailHook(const std::string& why) const {
  set_.session->session().Abort("the communication hook failed for the gradient of " +
                                core::Quoted(what_.name) + ": " + why);
  ThrowIfError(set_.session->Check());
}

void ParameterGradient::CallHook() {
  GradientBucket bucket;
  bucket.name = what_.key;
  bucket.index = what_.index;
  // With a version counter of its own: what the hook does to it is no change of the gradient.
  bucket.buffer = moved_.variable_data().view(-1);
  bucket.parameters = {what_.name};
  bucket.parameter_tensors = {what_.parameter};
  bucket.gradients = {bucket.buffer.view(moved_.sizes())};
  try {
    finish_hook_ = what_.rule->hook(bucket);
  } catch (...) {
    FailHook(TextOfCurrent());
  }
  if (!finish_hook_) FailHook("it returned nothing to call");
}

void ParameterGradient::PutInto(std::shared_ptr<Bucket> bucket, std::size_t part) {
  bucket_ = std::move(bucket);
  part_ = part;
}

void ParameterGradient::TakeOut() { bucket_ = std::shared_ptr<Bucket>(); }

std::vector<std::shared_ptr<ParameterGradient>> ParameterGradient::BucketMates() const {
  std::vector<std::shared_ptr<ParameterGradient>> mates;
  const std::shared_ptr<Bucket> bucket = bucket_;
  if (!bucket) return mates;
  for (const auto& gradient : bucket->gradients) {
    if (auto alive = gradient.lock()) mates.push_back(std::move(alive));
  }
  return mates;
}

void ParameterGradient::Submit(bool will_wait, const at::Tensor& incoming, bool stays) {
  found_ = what_.parameter.grad();
  present_ = found_.defined() && what_.parameter.requires_grad() && !stays;
  shares_ = found_.defined() && SharesMemory(found_, incoming);
  if (found_.defined()) version_ = VersionOf(found_);
  seen_ = {};
  if (present_) {
    seen_.order = what_.ready_count->fetch_add(1, std::memory_order_relaxed);
    seen_.dense = !IsSparse(found_) || what_.rule->sparse_as_dense;
    seen_.stays_out = !seen_.dense;
  }
  refused_ = WhyNotAveraged();
  round_ = what_.round->load();
  Start(will_wait);
}

void ParameterGradient::SubmitMissing(bool averaged) {
  const bool touched = gate_.touched();
  const at::Tensor& gradient = what_.parameter.grad();
  if (touched) {
    on_average_ = on_average_ && HoldsAverage();  // in no_sync(), and nobody has zeroed it since
  } else {
    on_average_ = gradient.defined() && (averaged || HoldsAverage());
  }
  const bool once_only = on_average_ && !what_.rule->may_repeat();
  if (once_only && touched && what_.rule->at_backward) return Refuse(kNoSecondBackward);
  Submit(/*will_wait=*/true, {}, /*stays=*/once_only && !touched);
}

void ParameterGradient::Refuse(const std::string& why) {
  found_ = what_.parameter.grad();
  if (found_.defined()) version_ = VersionOf(found_);
  present_ = false;
  seen_ = {};
  refused_ = why;
  round_ = what_.round->load();
  Start(/*will_wait=*/false);
}

std::string ParameterGradient::WhyNotAveraged() const {
  if (!what_.rule->at_backward || !present_ || !found_.requires_grad()) return {};
  return std::string(
      "it is differentiable itself (backward with create_graph), and its average "
      "would lose that graph: compute it by torch::autograd::grad, or average in "
      "step(), by average_at of DistributedOptimizer");
}

bool ParameterGradient::MovesSparse() const {
  if (!refused_.empty()) return false;
  if (what_.rule->sparse_as_dense || what_.rule->hook) return false;
  return present_ ? IsSparse(found_) : sparse_dims_ > 0;
}

void ParameterGradient::Start(bool will_wait) {
  if (what_.rule->alone) return;
  at::NoGradGuard no_grad;
  if (std::shared_ptr<Bucket> bucket = bucket_; bucket && !bucket->outdated()) {
    StartInBucket(std::move(bucket), will_wait);
  } else if (MovesSparse()) {
    StartSparse(will_wait);
  } else {
    StartDense(will_wait);
  }
}

// The work but for its key and its memory.
core::WorkPtr ParameterGradient::DescribeDense() {
  const bool as_found = present_ && !(what_.rule->sparse_as_dense && IsSparse(found_));
  const at::Tensor& shaped = as_found ? found_ : what_.parameter;
  on_gpu_.reset();
  if (IsOnGpu(shaped) && !what_.rule->hook) on_gpu_ = std::make_shared<ops::cuda::DeviceWork>();
  const core::WorkPtr work = on_gpu_ ? on_gpu_ : std::make_shared<core::Work>();
  if (!present_) work->request.absent = {true};
  std::string& invalid = work->request.invalid;
  invalid = refused_.empty() ? WhyNotMovable(shaped) : refused_;
  if (invalid.empty() && captured_) invalid = kCaptured;
  if (invalid.empty() && on_gpu_) {
    invalid = FindGpu(shaped);
    if (invalid.empty()) {
      on_gpu_->device = gpu_->device();
      const core::Status noted = NoteProducer(*on_gpu_, *gpu_);
      captured_ = noted.code() == core::StatusCode::kInvalidArgument;
      invalid = captured_ ? kCaptured : noted.message();
    }
  }
  core::Signature signature = MakeSignature(shaped);
  if (!signature_ || *signature_ != signature) {
    signature_ = std::make_shared<const core::Signature>(std::move(signature));
  }
  work->request.signature = signature_;
  return work;
}

// Of a tensor on one: a parameter may have moved there, or to another.
std::string ParameterGradient::FindGpu(const at::Tensor& shaped) {
  if (!IsOnGpu(shaped) || (gpu_ && gpu_->device()->index() == shaped.device().index())) return {};
  gpu_.reset();
  return FindGpuOf(shaped, *set_.session, &gpu_);
}

void ParameterGradient::StartDense(bool will_wait) {
  const core::WorkPtr work = DescribeDense();
  if (round_ != 0) {
    auto signature = std::make_shared<core::Signature>(*signature_);
    signature->subject = round_;
    work->request.signature = std::move(signature);
  }
  work->request.key = core::Key::Named(set_.members.set, what_.key);
  std::string& invalid = work->request.invalid;
  // The hooks of the other ranks wait for this one's all the same, which then brings zeros.
  const bool calls_hook = what_.rule->hook != nullptr;
  if (calls_hook && !invalid.empty()) present_ = false;
  std::string no_memory;
  if (invalid.empty() || calls_hook) no_memory = TryGiveMemory(*work);
  if (invalid.empty()) invalid = no_memory;
  if (invalid.empty() && on_gpu_) invalid = NoteReadyInStreams({work}, *gpu_).message();
  if (calls_hook && !no_memory.empty()) FailHook(no_memory);
  if (calls_hook) CallHook();
  ThrowIfError(set_.session->Submit(work, will_wait));
  handle_ = work->handle;
}

// What does not fit makes the request of the whole bucket invalid, so that all ranks take the
// bucket apart.
void ParameterGradient::StartInBucket(std::shared_ptr<Bucket> bucket, bool will_wait) {
  using Arrival = fusion::BucketAssembly::Arrival;
  const core::WorkPtr work = DescribeDense();
  std::string& invalid = work->request.invalid;
  if (invalid.empty() && *signature_ != bucket->assembly.SignatureOf(part_)) {
    invalid = "it differs from what its parameter was when the bucket was laid out";
    seen_.stays_out |= *signature_ != MakeSignature(what_.parameter);
  }
  if (invalid.empty() && ContractStrides(what_.parameter) != bucket->strides[part_]) {
    invalid = "its strides differ from those of its parameter when the bucket was made";
  }
  in_ = bucket;
  in_part_ = part_;
  if (invalid.empty()) invalid = TryGiveMemory(*work);
  if (!invalid.empty()) invalid = "the gradient of " + core::Quoted(what_.name) + ": " + invalid;
  const Arrival arrival = bucket->assembly.Put(part_, work);
  if (arrival == Arrival::kInFlight) {
    in_.reset();
    ThrowWrittenAgain();
  }
  if (arrival == Arrival::kEarly) return;
  const core::WorkPtr whole = bucket->assembly.Assemble(round_);
  // Later than their hooks might, but once for all of them.
  if (on_gpu_ && whole->request.invalid.empty()) {
    core::Status noted = NoteReadyInStreams(whole->parts, *gpu_);
    if (noted.ok()) noted = NoteVacant(whole->parts, *gpu_);
    whole->request.invalid = noted.message();
  }
  ThrowIfError(set_.session->Submit(whole, will_wait));
  bucket->assembly.NoteSubmitted(whole);
}

// One grouped all-gather of indices and values.
void ParameterGradient::StartSparse(bool will_wait) {
  at::Tensor mine = found_;
  if (present_) {
    version_ = VersionOf(found_);
  } else {
    // No entries. What it is must fit, what the others have decides its form.
    const auto sizes = what_.parameter.sizes();
    std::vector<std::int64_t> values = {0};
    values.insert(values.end(), sizes.begin() + sparse_dims_, sizes.end());
    const auto like = what_.parameter.options();
    mine = at::sparse_coo_tensor(at::empty({sparse_dims_, 0}, like.dtype(at::kLong)),
                                 at::empty(values, like), sizes);
    if (found_.defined()) version_ = VersionOf(found_);
  }
  const bool is_average = what_.rule->reduction == core::ReduceOp::kAverage;
  const auto options = AllreduceOptions()
                           .name(what_.key)
                           .op(is_average ? ReduceOp::Average : ReduceOp::Sum)
                           .prescale(what_.rule->prescale)
                           .postscale(what_.rule->postscale)
                           .process_set(set_.process_set);
  sparse_ = detail::StartSparse(mine, options, will_wait, set_.session, round_);
}

}  // namespace sirtaki::detail
