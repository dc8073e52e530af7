#include "frameworks/torch/parameter_gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "core/text.h"
#include "frameworks/torch/compression.h"
#include "frameworks/torch/gradient_form.h"
#include "frameworks/torch/sparse_call.h"
#include "frameworks/torch/tensor_bridge.h"
#include "frameworks/torch/throw.h"
#include "sirtaki/error.h"

namespace sirtaki::detail {

using torch::autograd::variable_list;

// Hooks outlive the optimizer if somebody else keeps the graph alive; they then do nothing.
template <class Base>
struct GradientHook : Base {
  explicit GradientHook(std::weak_ptr<ParameterGradient> to) : gradient(std::move(to)) {}
  void BeforeAccumulate() const {
    if (const auto alive = gradient.lock()) alive->OnAccumulate();
  }
  void AfterAccumulate() const {
    if (const auto alive = gradient.lock()) alive->OnGradient();
  }
  const std::weak_ptr<ParameterGradient> gradient;
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
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    AfterAccumulate();
    return outputs;
  }
};

template <class Hooks>
void Erase(Hooks& hooks, const void* hook) {
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(),
                             [hook](const auto& held) { return held.get() == hook; }),
              hooks.end());
}

}  // namespace

ParameterGradient::ParameterGradient(Description description, SessionSet set)
    : what_(std::move(description)), set_(std::move(set)), gate_(what_.rule->passes) {}

ParameterGradient::~ParameterGradient() {
  Detach();
  Clear();
}

void ParameterGradient::Attach() {
  if (!what_.parameter.requires_grad()) return;
  takes_part_ = true;
  if (what_.rule->of_steps()) return;
  auto accumulator = torch::autograd::impl::grad_accumulator(what_.parameter);
  if (accumulator == accumulator_) return;
  Detach();
  if (!accumulator) return;
  auto before = std::make_unique<BeforeHook>(weak_from_this());
  auto after = std::make_unique<AfterHook>(weak_from_this());
  pre_hook_ = before.get();
  post_hook_ = after.get();
  accumulator->add_pre_hook(std::move(before));
  accumulator->add_post_hook(std::move(after));
  accumulator_ = std::move(accumulator);
}

void ParameterGradient::Detach() {
  if (!accumulator_) return;
  Erase(accumulator_->pre_hooks(), pre_hook_);
  Erase(accumulator_->post_hooks(), post_hook_);
  accumulator_.reset();
}

core::Status ParameterGradient::Refused(const std::string& text) const {
  return core::Status(core::StatusCode::kInvalidArgument, text,
                      core::Origin{set_.session->topology().rank, "", what_.key});
}

void ParameterGradient::ThrowWrittenAgain() const {
  ThrowStatus(Refused("backward() met the gradient of " + core::Quoted(what_.name) +
                      " while it is being reduced: " +
                      (what_.rule->after_backward
                           ? "an earlier backward() of the module has failed or is still running; "
                             "call forward() of the module, which ends it, before the next"
                           : "call step() or synchronize() on the optimizer between two "
                             "backward(), and zero_grad() after that; to accumulate, declare it "
                             "with backward_passes_per_step or no_sync()")));
}

// Before the node adds to memory that the reduction is reading.
void ParameterGradient::OnAccumulate() const {
  if (gate_.reported() && !set_.session->gone()) ThrowWrittenAgain();
}

void ParameterGradient::OnGradient() {
  // The optimizer says so in step(); a later session's may be at work on the same parameter.
  if (set_.session->gone()) return;
  switch (gate_.Arrive()) {
    case fusion::GradientGate::Arrival::kEarly:
      return;
    case fusion::GradientGate::Arrival::kInFlight:
      ThrowWrittenAgain();
    case fusion::GradientGate::Arrival::kReport:
      break;
  }
  Submit(/*will_wait=*/false);
  if (on_submitted_) on_submitted_();
}

core::Signature ParameterGradient::MakeSignature(const at::Tensor& shaped) const {
  core::Signature signature = Describe(shaped);
  signature.kind = core::OpKind::kAllReduce;
  if (what_.rule->hook) {
    // Nothing is moved: it tells who has the gradient, and that all ranks are ready.
    signature.shape = {0};
    return signature;
  }
  signature.reduction = what_.rule->reduction;
  signature.prescale = what_.rule->prescale;
  signature.postscale = what_.rule->postscale;
  signature.wire = WireType(what_.rule->compression, what_.rule->scope, set_.session->topology(),
                            shaped.scalar_type());
  return signature;
}

void ParameterGradient::GiveMemory(core::Work& work) {
  if (present_ && IsSparse(found_)) {
    moved_ = found_.detach().to_dense();
  } else if (present_) {
    moved_ = Flat(found_);
    // A gradient with a graph may be what its graph has kept: it stays as it is.
    if (found_.requires_grad() && moved_.is_alias_of(found_)) moved_ = moved_.clone();
    if (moved_.is_alias_of(found_)) NoteOverwritten(found_);
  } else {
    moved_ = at::zeros(what_.parameter.sizes(), what_.parameter.options().requires_grad(false));
  }
  if (found_.defined()) version_ = VersionOf(found_);
  work.input = work.output = moved_.mutable_data_ptr();
  work.keep_alive = std::make_shared<at::Tensor>(moved_);
}

std::string ParameterGradient::TryGiveMemory(core::Work& work) {
  try {
    GiveMemory(work);
    return {};
  } catch (const std::exception& error) {
    return WhyNoMemory(error);
  }
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
  bucket.gradients = {bucket.buffer.view(moved_.sizes())};
  try {
    finish_hook_ = what_.rule->hook(bucket);
  } catch (...) {
    FailHook(TextOfCurrent());
  }
  if (!finish_hook_) FailHook("it returned nothing to call");
}

void ParameterGradient::Submit(bool will_wait) {
  found_ = what_.parameter.grad();
  present_ = found_.defined() && what_.parameter.requires_grad();
  Start(will_wait);
}

bool ParameterGradient::MovesSparse() const {
  if (what_.rule->sparse_as_dense || what_.rule->hook) return false;
  return present_ ? IsSparse(found_) : sparse_dims_ > 0;
}

void ParameterGradient::Start(bool will_wait) {
  at::NoGradGuard no_grad;
  if (MovesSparse()) {
    StartSparse(will_wait);
  } else {
    StartDense(will_wait);
  }
}

void ParameterGradient::StartDense(bool will_wait) {
  auto work = std::make_shared<core::Work>();
  work->request.key = core::Key::Named(set_.members.set, what_.key);
  if (!present_) work->request.absent = {true};
  const bool as_found = present_ && !(what_.rule->sparse_as_dense && IsSparse(found_));
  const at::Tensor& shaped = as_found ? found_ : what_.parameter;
  std::string& invalid = work->request.invalid;
  invalid = WhyNotMovable(shaped);
  core::Signature signature = MakeSignature(shaped);
  if (!signature_ || *signature_ != signature) {
    signature_ = std::make_shared<const core::Signature>(std::move(signature));
  }
  work->request.signature = signature_;
  if (invalid.empty()) invalid = TryGiveMemory(*work);
  if (invalid.empty() && what_.rule->hook) CallHook();
  ThrowIfError(set_.session->Submit(work, will_wait));
  handle_ = work->handle;
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
    mine = at::sparse_coo_tensor(at::empty({sparse_dims_, 0}, at::kLong),
                                 at::empty(values, what_.parameter.scalar_type()), sizes);
    if (found_.defined()) version_ = VersionOf(found_);
  }
  const bool is_average = what_.rule->reduction == core::ReduceOp::kAverage;
  const auto options = AllreduceOptions()
                           .name(what_.key)
                           .op(is_average ? ReduceOp::Average : ReduceOp::Sum)
                           .prescale(what_.rule->prescale)
                           .postscale(what_.rule->postscale)
                           .process_set(set_.process_set);
  sparse_ = detail::StartSparse(mine, options, will_wait, set_.session);
}

void ParameterGradient::Deliver(const at::Tensor& average) {
  if (found_.defined() && !found_.requires_grad() && !IsSparse(found_)) {
    if (average.data_ptr() != found_.data_ptr()) found_.copy_(average);
  } else {
    what_.parameter.mutable_grad() = average;
  }
}

void ParameterGradient::CollectFromHook() {
  at::Tensor result;
  try {
    result = finish_hook_();
  } catch (...) {
    FailHook(TextOfCurrent());
  }
  if (!result.defined() || result.numel() != moved_.numel() ||
      result.scalar_type() != moved_.scalar_type() || !result.device().is_cpu()) {
    FailHook("it gave " + TypeAndShape(result) + " for " + TypeAndShape(moved_) +
             "; type and number of elements have to be equal");
  }
  Deliver(result.detach().reshape(moved_.sizes()));
}

// Precondition: Await has said ok.
core::Status ParameterGradient::Collect() {
  const at::Tensor& now = what_.parameter.grad();
  const bool same = now.is_same(found_);
  if (!same || (now.defined() && VersionOf(now) != version_)) {
    return Refused("the gradient of " + core::Quoted(what_.name) + " was " +
                   (same ? "changed" : "replaced") +
                   " while it was being reduced: call step() or synchronize() on the optimizer "
                   "before zero_grad() and before changing gradients");
  }
  if (sparse_) {
    sparse_dims_ = moved_.sparse_dim();
    // Ranks without the gradient cannot tell an empty one from none: it is none for all of them.
    what_.parameter.mutable_grad() = moved_._nnz() > 0 ? moved_ : at::Tensor();
    return {};
  }
  if (handle_->absent_everywhere()) return {};
  sparse_dims_ = 0;
  if (what_.rule->hook) {
    CollectFromHook();
  } else {
    Deliver(moved_);
  }
  return {};
}

// Not ok with a handle that is not done: the wait was given up.
core::Status ParameterGradient::Await() {
  if (sparse_) {
    try {
      moved_ = sparse_->Results().front();
      return {};
    } catch (const Error& error) {
      if (error.code() != ErrorCode::mismatch) throw;
      sparse_error_ = std::current_exception();
      return Refused(error.what());
    }
  }
  if (!handle_) {
    // Its submission threw in backward(), and the program went on.
    return Refused("the reduction of the gradient of " + core::Quoted(what_.name) +
                   " could not be started in backward(), which threw the reason");
  }
  return handle_->done() ? handle_->status() : set_.session->Wait(*handle_);
}

// After a mismatch, of which all ranks know: it may be that some have a sparse gradient and others,
// which have none, did not know of that. False if it is something else.
bool ParameterGradient::StartInAgreedForm() {
  const bool is_sparse = present_ && IsSparse(found_) && !what_.rule->sparse_as_dense;
  const auto form =
      AgreeOnForm(what_.name, what_.key,
                  {present_, is_sparse ? found_.sparse_dim() : 0, sparse_ != nullptr}, set_);
  if (!form) return false;
  // Started anew, it would not be noticed any more that the gradient was written meanwhile.
  const bool written = found_.defined() && VersionOf(found_) != version_;
  if (handle_) handle_->Observe();
  handle_.reset();
  sparse_.reset();
  sparse_dims_ = *form;
  Start(/*will_wait=*/true);
  if (written) --version_;
  return true;
}

core::Status ParameterGradient::Finish() {
  struct Reset {
    ParameterGradient* self;
    ~Reset() {
      if (self == nullptr) return;
      self->Clear();
      self->gate_.Reset();
    }
  } reset{this};
  at::NoGradGuard no_grad;
  core::Status status = Await();
  if (handle_ && !handle_->done()) {
    reset.self = nullptr;  // in a forked child
    return status;
  }
  const bool mismatch = sparse_error_ || status.code() == core::StatusCode::kMismatch;
  if (mismatch && !what_.rule->hook && StartInAgreedForm()) {
    sparse_error_ = nullptr;
    status = Await();
  }
  if (sparse_error_) std::rethrow_exception(sparse_error_);
  return status.ok() ? Collect() : status;
}

void ParameterGradient::Clear() {
  if (handle_) handle_->Observe();
  handle_.reset();
  sparse_.reset();
  sparse_error_ = nullptr;
  found_ = at::Tensor();
  moved_ = at::Tensor();
  finish_hook_ = nullptr;
}

}  // namespace sirtaki::detail
