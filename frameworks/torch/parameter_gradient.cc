#include "frameworks/torch/parameter_gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "core/text.h"
#include "frameworks/torch/compression.h"
#include "frameworks/torch/tensor_bridge.h"
#include "frameworks/torch/throw.h"

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

ParameterGradient::ParameterGradient(Description description, std::shared_ptr<SessionState> session)
    : what_(std::move(description)), session_(std::move(session)), gate_(what_.rule->passes) {}

ParameterGradient::~ParameterGradient() {
  Detach();
  Clear();
}

void ParameterGradient::Attach() {
  if (!what_.parameter.requires_grad()) return;
  takes_part_ = true;
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
                      core::Origin{session_->topology().rank, "", what_.key});
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
  if (gate_.reported() && !session_->gone()) ThrowWrittenAgain();
}

void ParameterGradient::OnGradient() {
  // The optimizer says so in step(); a later session's may be at work on the same parameter.
  if (session_->gone()) return;
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
  signature.wire = WireType(what_.rule->compression, what_.rule->scope, session_->topology(),
                            shaped.scalar_type());
  return signature;
}

void ParameterGradient::GiveMemory(core::Work& work) {
  if (present_) {
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
  session_->session().Abort("the communication hook failed for the gradient of " +
                            core::Quoted(what_.name) + ": " + why);
  ThrowIfError(session_->Check());
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
  at::NoGradGuard no_grad;
  auto work = std::make_shared<core::Work>();
  work->request.key = core::Key::Named(core::kWorldSet, what_.key);
  found_ = what_.parameter.grad();
  present_ = found_.defined() && what_.parameter.requires_grad();
  if (!present_) work->request.absent = {true};
  const at::Tensor& shaped = present_ ? found_ : what_.parameter;
  std::string& invalid = work->request.invalid;
  invalid = WhyNotMovable(shaped);
  core::Signature signature = MakeSignature(shaped);
  if (!signature_ || *signature_ != signature) {
    signature_ = std::make_shared<const core::Signature>(std::move(signature));
  }
  work->request.signature = signature_;
  if (invalid.empty()) invalid = TryGiveMemory(*work);
  if (invalid.empty() && what_.rule->hook) CallHook();
  ThrowIfError(session_->Submit(work, will_wait));
  handle_ = work->handle;
}

void ParameterGradient::Deliver(const at::Tensor& average) {
  if (found_.defined() && !found_.requires_grad()) {
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

// Precondition: the handle is done and ok.
core::Status ParameterGradient::Collect() {
  const at::Tensor& now = what_.parameter.grad();
  const bool same = now.is_same(found_);
  if (!same || (now.defined() && VersionOf(now) != version_)) {
    return Refused("the gradient of " + core::Quoted(what_.name) + " was " +
                   (same ? "changed" : "replaced") +
                   " while it was being reduced: call step() or synchronize() on the optimizer "
                   "before zero_grad() and before changing gradients");
  }
  if (handle_->absent_everywhere()) return {};
  if (what_.rule->hook) {
    CollectFromHook();
  } else {
    Deliver(moved_);
  }
  return {};
}

core::Status ParameterGradient::Finish() {
  core::Status status;
  if (handle_) {
    if (!handle_->done()) {
      status = session_->Wait(*handle_);
      if (!handle_->done()) return status;  // in a forked child
    }
    status = handle_->status();
  } else {
    // Its submission threw in backward(), and the program went on.
    status = Refused("the reduction of the gradient of " + core::Quoted(what_.name) +
                     " could not be started in backward(), which threw the reason");
  }
  struct Reset {
    ParameterGradient& self;
    ~Reset() {
      self.Clear();
      self.gate_.Reset();
    }
  } const reset{*this};
  at::NoGradGuard no_grad;
  return status.ok() ? Collect() : status;
}

void ParameterGradient::Clear() {
  if (handle_) handle_->Observe();
  handle_.reset();
  found_ = at::Tensor();
  moved_ = at::Tensor();
  finish_hook_ = nullptr;
}

}  // namespace sirtaki::detail
