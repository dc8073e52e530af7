#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include "core/request.h"
#include "core/wire.h"
#include "core/work.h"
#include "frameworks/torch/agreement.h"
#include "frameworks/torch/named_parameters.h"
#include "frameworks/torch/pending_tensor.h"
#include "frameworks/torch/session_state.h"
#include "frameworks/torch/tensor_bridge.h"
#include "frameworks/torch/throw.h"
#include "fusion/gradient_slots.h"
#include "sirtaki/error.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::detail {

class GradientReducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(NamedParameters named, std::string prefix, std::shared_ptr<SessionState> session);
  ~Impl();

  void AttachHooks();
  void OnAccumulate(std::size_t index) const;  // before the gradient is written
  void OnGradient(std::size_t index);          // after it was written
  void CheckSession() const;
  void Synchronize();
  at::Tensor AverageLoss(const at::Tensor& loss);

  bool active() const { return session_->topology().size > 1; }
  bool AnyOutstanding() const { return slots_.outstanding() < slots_.size(); }
  std::string FirstOutstanding() const;

  // True once all gradients are averaged, until one is written again or the step is done.
  std::atomic<bool> synchronized{false};

 private:
  // One parameter, and what is under way for its gradient. The fields of the second part belong to
  // whoever reported the slot until Synchronize.
  struct Slot {
    std::string name;
    core::Key key;
    at::Tensor parameter;
    std::shared_ptr<torch::autograd::Node> accumulator;  // null while frozen
    const void* pre_hook = nullptr;
    const void* post_hook = nullptr;
    core::SignaturePtr signature;

    at::Tensor gradient;  // the tensor in .grad when it was reported; undefined if there was none
    std::int64_t version = 0;  // of `gradient` then
    at::Tensor moved;          // what is reduced: gradient's own memory, or a flat copy, or zeros
    core::HandlePtr handle;
  };

  [[noreturn]] void ThrowWrittenAgain(const Slot& slot) const;
  static core::Status Refused(const Slot& slot);
  void Attach(std::size_t index);
  static void Detach(Slot& slot);
  static std::string GiveMemory(Slot& slot, core::Work& work);
  void Submit(Slot& slot, bool will_wait);
  void SubmitMissing();
  core::Status Collect(Slot& slot);
  static void Clear(Slot& slot);

  const std::shared_ptr<SessionState> session_;
  const std::string prefix_;
  std::vector<Slot> parameters_;
  fusion::GradientSlots slots_;
};

namespace {

using torch::autograd::variable_list;

// Hooks outlive the optimizer if somebody else keeps the graph alive; they then do nothing.
template <class Impl>
struct BeforeHook : torch::autograd::FunctionPreHook {
  BeforeHook(std::weak_ptr<Impl> to, std::size_t i) : impl(std::move(to)), index(i) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto alive = impl.lock()) alive->OnAccumulate(index);
    return gradients;
  }
  const std::weak_ptr<Impl> impl;
  const std::size_t index;
};

template <class Impl>
struct AfterHook : torch::autograd::FunctionPostHook {
  AfterHook(std::weak_ptr<Impl> to, std::size_t i) : impl(std::move(to)), index(i) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (const auto alive = impl.lock()) alive->OnGradient(index);
    return outputs;
  }
  const std::weak_ptr<Impl> impl;
  const std::size_t index;
};

// A key is the prefix and the name.
std::string WhyTooLong(const std::vector<std::string>& names, const std::string& prefix) {
  const std::size_t most = core::kMaxNameBytes - prefix.size();
  for (const std::string& name : names) {
    if (name.size() <= most) continue;
    return "a parameter's name of " + std::to_string(name.size()) + " bytes, \"" +
           name.substr(0, 40) + "...\"; at most " + std::to_string(most) + " are allowed";
  }
  return {};
}

template <class Hooks>
void Erase(Hooks& hooks, const void* hook) {
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(),
                             [hook](const auto& held) { return held.get() == hook; }),
              hooks.end());
}

}  // namespace

GradientReducer::Impl::Impl(NamedParameters named, std::string prefix,
                            std::shared_ptr<SessionState> session)
    : session_(std::move(session)), prefix_(std::move(prefix)), slots_(named.names.size()) {
  if (!active()) return;
  parameters_.resize(named.names.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Slot& slot = parameters_[i];
    slot.name = std::move(named.names[i]);
    slot.key = core::Key::Named(core::kWorldSet, prefix_ + slot.name);
    slot.parameter = std::move(named.parameters[i]);
  }
}

GradientReducer::Impl::~Impl() {
  for (Slot& slot : parameters_) {
    Detach(slot);
    Clear(slot);
  }
}

void GradientReducer::Impl::AttachHooks() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) Attach(i);
}

// Also after the fact: a parameter may be unfrozen later, or get a new node with a new type.
void GradientReducer::Impl::Attach(std::size_t index) {
  Slot& slot = parameters_[index];
  if (!slot.parameter.requires_grad()) return;
  auto accumulator = torch::autograd::impl::grad_accumulator(slot.parameter);
  if (accumulator == slot.accumulator) return;
  Detach(slot);
  if (!accumulator) return;
  auto before = std::make_unique<BeforeHook<Impl>>(weak_from_this(), index);
  auto after = std::make_unique<AfterHook<Impl>>(weak_from_this(), index);
  slot.pre_hook = before.get();
  slot.post_hook = after.get();
  accumulator->add_pre_hook(std::move(before));
  accumulator->add_post_hook(std::move(after));
  slot.accumulator = std::move(accumulator);
}

void GradientReducer::Impl::Detach(Slot& slot) {
  if (!slot.accumulator) return;
  Erase(slot.accumulator->pre_hooks(), slot.pre_hook);
  Erase(slot.accumulator->post_hooks(), slot.post_hook);
  slot.accumulator.reset();
}

void GradientReducer::Impl::ThrowWrittenAgain(const Slot& slot) const {
  throw Error(ErrorCode::invalid_argument,
              "backward() met the gradient of \"" + slot.name +
                  "\" while it is being reduced: call step() or synchronize() on the optimizer "
                  "between two backward(); to accumulate, add up the losses and call it once",
              ErrorOrigin{session_->topology().rank, "", slot.name});
}

// Before the node adds to memory that the reduction is reading.
void GradientReducer::Impl::OnAccumulate(std::size_t index) const {
  if (slots_.reported(index)) ThrowWrittenAgain(parameters_[index]);
}

void GradientReducer::Impl::OnGradient(std::size_t index) {
  CheckSession();
  Slot& slot = parameters_[index];
  if (!slots_.Report(index)) ThrowWrittenAgain(slot);
  synchronized.store(false, std::memory_order_relaxed);
  Submit(slot, /*will_wait=*/false);
}

// Why there is none, for the peers to learn it as well; empty if there is.
std::string GradientReducer::Impl::GiveMemory(Slot& slot, core::Work& work) {
  try {
    if (slot.gradient.defined()) {
      slot.moved = Flat(slot.gradient);
      NoteOverwritten(slot.gradient);
      slot.version = VersionOf(slot.gradient);
    } else {
      slot.moved = at::zeros(slot.parameter.sizes(), slot.parameter.options().requires_grad(false));
    }
    work.input = work.output = slot.moved.mutable_data_ptr();
    work.keep_alive = std::make_shared<at::Tensor>(slot.moved);
    return {};
  } catch (const std::exception& error) {
    return WhyNoMemory(error);
  }
}

// Precondition: the slot is reported by the caller.
void GradientReducer::Impl::Submit(Slot& slot, bool will_wait) {
  at::NoGradGuard no_grad;
  auto work = std::make_shared<core::Work>();
  work->request.key = slot.key;
  slot.gradient = slot.parameter.grad();
  if (!slot.gradient.defined()) work->request.absent = {true};
  const at::Tensor& shaped = slot.gradient.defined() ? slot.gradient : slot.parameter;
  work->request.invalid = WhyNotMovable(shaped);
  core::Signature signature = Describe(shaped);
  signature.kind = core::OpKind::kAllReduce;
  signature.reduction = core::ReduceOp::kAverage;
  if (!slot.signature || *slot.signature != signature) {
    slot.signature = std::make_shared<const core::Signature>(std::move(signature));
  }
  work->request.signature = slot.signature;
  if (work->request.invalid.empty()) work->request.invalid = GiveMemory(slot, *work);
  ThrowIfError(session_->Submit(work, will_wait));
  slot.handle = work->handle;
}

void GradientReducer::Impl::CheckSession() const {
  if (session_->gone()) {
    ThrowStatus(core::Status(core::StatusCode::kNotInitialized,
                             "the optimizer's session was shut down; make a new one after init()"));
  }
}

void GradientReducer::Impl::SubmitMissing() {
  for (const std::size_t index : slots_.Unreported()) {
    Slot& slot = parameters_[index];
    Attach(index);
    if (!slot.parameter.requires_grad()) continue;
    slots_.Report(index);
    Submit(slot, /*will_wait=*/true);
  }
}

core::Status GradientReducer::Impl::Refused(const Slot& slot) {
  return core::Status(core::StatusCode::kInvalidArgument,
                      "the reduction of the gradient of \"" + slot.name +
                          "\" could not be started in backward(), which threw the reason");
}

// Puts the average where the optimizer looks for it. Precondition: the handle is done and ok.
core::Status GradientReducer::Impl::Collect(Slot& slot) {
  at::Tensor& now = slot.parameter.mutable_grad();
  const bool same = now.is_same(slot.gradient);
  if (!same || (now.defined() && VersionOf(now) != slot.version)) {
    return core::Status(core::StatusCode::kInvalidArgument,
                        "the gradient of \"" + slot.name + "\" was " +
                            (same ? "changed" : "replaced") +
                            " while it was being reduced: call step() or synchronize() on the "
                            "optimizer before zero_grad() and before changing gradients");
  }
  if (slot.gradient.defined()) {
    if (!slot.moved.is_alias_of(slot.gradient)) slot.gradient.detach().copy_(slot.moved);
  } else if (!slot.handle->absent_everywhere()) {
    now = slot.moved;
  }
  return {};
}

void GradientReducer::Impl::Clear(Slot& slot) {
  if (slot.handle) slot.handle->Observe();
  slot.handle.reset();
  slot.gradient = at::Tensor();
  slot.moved = at::Tensor();
}

void GradientReducer::Impl::Synchronize() {
  CheckSession();
  at::NoGradGuard no_grad;
  core::Status first_error;
  const auto note = [&first_error](core::Status status) {
    if (first_error.ok()) first_error = std::move(status);
  };
  std::exception_ptr refused;
  try {
    SubmitMissing();
  } catch (...) {
    // The group has failed, or memory is short; what was accepted is waited for all the same.
    refused = std::current_exception();
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Slot& slot = parameters_[i];
    if (!slot.handle) {
      // Frozen, or its submission threw in backward() and the program went on.
      if (slots_.reported(i) && !refused) note(Refused(slot));
      continue;
    }
    if (!slot.handle->done()) {
      core::Status waited = session_->Wait(*slot.handle);
      if (!slot.handle->done()) {
        note(std::move(waited));
        continue;
      }
    }
    note(slot.handle->status().ok() ? Collect(slot) : slot.handle->status());
  }
  for (Slot& slot : parameters_) Clear(slot);
  slots_.Reset();
  if (refused) std::rethrow_exception(refused);
  ThrowIfError(first_error);
  synchronized.store(true, std::memory_order_relaxed);
}

std::string GradientReducer::Impl::FirstOutstanding() const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_.reported(i)) return parameters_[i].name;
  }
  return {};
}

at::Tensor GradientReducer::Impl::AverageLoss(const at::Tensor& loss) {
  TensorCall call;
  call.tensor = loss;
  call.name = prefix_ + "loss of the closure";
  call.reduction = core::ReduceOp::kAverage;
  call.will_wait = true;
  return PendingTensor::Start(std::move(call), session_)->Synchronize();
}

GradientReducer::GradientReducer(const torch::optim::Optimizer& optimizer,
                                 NamedTensors named_parameters, const Session& session) {
  auto state = StateOf(session);
  const int number = state->NextOptimizerNumber();
  const std::string suffix = number == 1 ? "" : "#" + std::to_string(number);
  const std::string prefix = "gradient" + suffix + "/";
  NamedParameters named = MatchNames(optimizer, named_parameters);
  if (named.error.empty()) named.error = WhyTooLong(named.names, prefix);
  AgreeOnList("parameters of the optimizer" + suffix, DescribeAll(named), named.error, state);
  impl_ = std::make_shared<Impl>(std::move(named), prefix, std::move(state));
  impl_->AttachHooks();
}

GradientReducer::GradientReducer(GradientReducer&&) noexcept = default;
GradientReducer& GradientReducer::operator=(GradientReducer&&) noexcept = default;
GradientReducer::~GradientReducer() = default;

GradientReducer::Impl& GradientReducer::impl() const {
  if (impl_) return *impl_;
  throw Error(ErrorCode::invalid_argument, "the optimizer is empty: it was moved from");
}

void GradientReducer::BeforeStep(bool with_closure) {
  impl().CheckSession();
  if (!impl_->active() || impl_->synchronized.load(std::memory_order_relaxed)) return;
  // A closure makes the gradients; only what a backward() before it has left is waited for here.
  if (with_closure && !impl_->AnyOutstanding()) return;
  impl_->Synchronize();
}

void GradientReducer::AfterStep() { impl_->synchronized.store(false, std::memory_order_relaxed); }

void GradientReducer::Synchronize() {
  impl().CheckSession();
  if (!impl_->active() || impl_->synchronized.load(std::memory_order_relaxed)) return;
  impl_->Synchronize();
}

void GradientReducer::CheckZeroGrad() const {
  if (!impl().active() || !impl_->AnyOutstanding()) return;
  throw Error(ErrorCode::invalid_argument,
              "zero_grad() while gradients are being reduced (\"" + impl_->FirstOutstanding() +
                  "\" is the first): call step() or synchronize() after backward() first");
}

std::function<at::Tensor()> GradientReducer::Wrap(std::function<at::Tensor()> closure) {
  if (!impl().active()) return closure;
  return [impl = impl_, closure = std::move(closure)] {
    impl->synchronized.store(false, std::memory_order_relaxed);
    at::Tensor loss = closure();
    if (!impl->synchronized.load(std::memory_order_relaxed)) impl->Synchronize();
    return loss.defined() ? impl->AverageLoss(loss) : loss;
  };
}

}  // namespace sirtaki::detail
