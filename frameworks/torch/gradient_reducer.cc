#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <unordered_set>
#include <utility>

#include "core/text.h"
#include "core/wire.h"
#include "frameworks/torch/agreement.h"
#include "frameworks/torch/equality.h"
#include "frameworks/torch/gradient_rule.h"
#include "frameworks/torch/named_parameters.h"
#include "frameworks/torch/parameter_gradient.h"
#include "frameworks/torch/pending_tensor.h"
#include "frameworks/torch/session_set.h"
#include "frameworks/torch/step_deltas.h"
#include "frameworks/torch/throw.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::detail {

using GradientPtr = std::shared_ptr<ParameterGradient>;
using LossClosure = GradientReducer::LossClosure;
using BaseStep = GradientReducer::BaseStep;

// In a set of one rank it has no members: there is nothing to do.
class GradientReducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(NamedTensors names, const DistributedOptimizerOptions& options, bool after_backward,
       const std::shared_ptr<SessionState>& session);

  // Takes the parameters of the optimizer that are new and drops those that are gone. Collective if
  // anything has changed since the last time.
  void Scan(const torch::optim::Optimizer& optimizer);
  // Takes the parameters that it was made with. Collective.
  void TakeAll();

  void CheckSession() const;
  bool active() const { return set_.size() > 1; }
  at::Tensor Step(const torch::optim::Optimizer& optimizer, LossClosure closure,
                  const BaseStep& base_step);
  void AfterStep() { synchronized_ = false; }
  void Synchronize();
  void SynchronizeUnlessDone();
  void BeforeZeroGrad(const torch::optim::Optimizer& optimizer);
  void BeforeForward();
  Scope NoSync();
  Scope SkipSynchronize();
  bool has_local_gradients() const { return active() && rule_->of_steps(); }
  const SessionSet& set() const { return set_; }
  const std::string& prefix() const { return prefix_; }

 private:
  void BeforeStep(const torch::optim::Optimizer& optimizer, bool with_closure);
  at::Tensor CombinedStep(LossClosure closure, const BaseStep& base_step);
  LossClosure Wrap(LossClosure closure);
  at::Tensor AverageLoss(const at::Tensor& loss);
  void NameAdded(const torch::optim::Optimizer& optimizer);
  void Take(const NamedParameters& named);
  std::vector<GradientPtr> GradientsOf(const NamedParameters& named, std::string* error);
  void OnSubmitted();
  void EndBackward();
  const ParameterGradient* FirstOutstanding() const;
  bool AnyTouched() const;
  void SubmitMissing();
  void StartAnew();
  void CheckParametersWhenDue();

  const SessionSet set_;
  NamedTensors names_;
  const std::shared_ptr<const GradientRule> rule_;
  std::string what_;                  // "parameters of the optimizer #2"
  std::string prefix_;                // of keys
  std::string invalid_;               // what is wrong with the options
  bool taken_ = false;                // the optimizer was looked at
  int added_ = 0;                     // parameters that came later, without a name
  std::vector<const void*> scanned_;  // its parameters, as they were last seen
  std::vector<GradientPtr> members_;
  // All gradients are averaged, and no step has used them yet.
  bool synchronized_ = false;
  const std::int64_t check_every_;  // steps; 0: never
  std::int64_t steps_ = 0;
  int skips_ = 0;                           // scopes of skip_synchronize
  std::atomic<bool> backward_ends_{false};  // a call at the end of this backward is on order
};

namespace {

// A key is the prefix and the name.
std::string WhyTooLong(const std::vector<std::string>& names, const std::string& prefix) {
  const std::size_t most = core::kMaxNameBytes - std::min(prefix.size(), core::kMaxNameBytes);
  for (const std::string& name : names) {
    if (name.size() <= most) continue;
    return "a parameter's name is too long: " + core::Quoted(name) + "; at most " +
           std::to_string(most) + " bytes are allowed";
  }
  return {};
}

// The first gradient that is still under way, in an error's words.
[[noreturn]] void ThrowOutstanding(const std::string& what, const ParameterGradient& first,
                                   const std::string& cure, const SessionState& session) {
  ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                           what + " while gradients are being reduced (" +
                               core::Quoted(first.name()) + " is the first): " + cure,
                           core::Origin{session.topology().rank, "", first.key()}));
}

}  // namespace

GradientReducer::Impl::Impl(NamedTensors names, const DistributedOptimizerOptions& options,
                            bool after_backward, const std::shared_ptr<SessionState>& session)
    : set_(session, options.process_set()),
      names_(std::move(names)),
      rule_(std::make_shared<const GradientRule>(MakeRule(options, after_backward))),
      invalid_(WhyInvalid(options, after_backward)),
      check_every_(options.check_parameters_every()) {
  const int number = set_.session->NextOptimizerNumber(set_.members.set);
  const std::string suffix = number == 1 ? "" : "#" + std::to_string(number);
  // By number, which all ranks have alike: names may differ by mistake.
  what_ = (after_backward ? "parameters of the module" : "parameters of the optimizer") + suffix;
  prefix_ = rule_->of_steps() ? "delta" : "gradient";
  prefix_ += (options.name().empty() ? suffix : ":" + options.name()) + "/";
}

void GradientReducer::Impl::CheckSession() const {
  if (set_.session->gone()) {
    ThrowStatus(core::Status(core::StatusCode::kNotInitialized,
                             "the optimizer's session was shut down; make a new one after init()"));
  }
}

// ---- which parameters ----

// Those that are new are not registered yet.
std::vector<GradientPtr> GradientReducer::Impl::GradientsOf(const NamedParameters& named,
                                                            std::string* error) {
  std::vector<GradientPtr> gradients;
  for (std::size_t i = 0; i < named.names.size(); ++i) {
    const std::string& name = named.names[i];
    GradientPtr gradient =
        set_.session->gradients().OfParameter(named.parameters[i].unsafeGetTensorImpl());
    if (gradient) {
      if (&gradient->rule() != rule_.get() && !CanShare(gradient->rule(), *rule_)) {
        *error =
            "the gradient of " + core::Quoted(name) +
            " is reduced for another optimizer or module (" + ToText(gradient->rule()) + "; here " +
            ToText(*rule_) +
            "): optimizers of the same parameter need the same options, op Average and no hook; a "
            "module that averages gradients takes an optimizer that does not";
        return gradients;
      }
    } else {
      const std::string key = prefix_ + name;
      if (set_.session->gradients().OfKey(core::Key::Named(set_.members.set, key))) {
        *error = "the name " + core::Quoted(name) + " is in use by another optimizer (" +
                 core::Quoted(key) + "): give optimizers different names";
        return gradients;
      }
      gradient = std::make_shared<ParameterGradient>(
          ParameterGradient::Description{name, key, static_cast<std::int64_t>(i),
                                         named.parameters[i], rule_},
          set_);
    }
    gradients.push_back(std::move(gradient));
  }
  return gradients;
}

void GradientReducer::Impl::Take(const NamedParameters& named) {
  std::string error = !invalid_.empty() ? invalid_ : named.error;
  if (error.empty()) error = WhyTooLong(named.names, prefix_);
  std::vector<GradientPtr> gradients;
  if (error.empty() && active()) gradients = GradientsOf(named, &error);

  std::vector<std::string> lines = DescribeAll(named);
  // Optimizers that share a parameter here have to share it everywhere.
  for (std::size_t i = 0; i < gradients.size() && error.empty(); ++i) {
    if (gradients[i]->key() != prefix_ + named.names[i]) lines[i] += ", as " + gradients[i]->key();
  }
  std::string options = "gradients by " + ToText(*rule_) + ", called " + core::Quoted(prefix_);
  if (check_every_ > 0) options += ", checked every " + std::to_string(check_every_) + " steps";
  lines.insert(lines.begin(), std::move(options));
  AgreeOnList(what_, lines, error, set_);

  for (const GradientPtr& gradient : gradients) {
    set_.session->gradients().Add(gradient->parameter().unsafeGetTensorImpl(),
                                  core::Key::Named(set_.members.set, gradient->key()), gradient);
    gradient->Attach();
    if (rule_->after_backward) {
      gradient->set_on_submitted([self = weak_from_this()] {
        if (const auto alive = self.lock()) alive->OnSubmitted();
      });
    }
  }
  members_ = std::move(gradients);
}

void GradientReducer::Impl::TakeAll() {
  NamedParameters named;
  std::unordered_set<const void*> seen;
  for (const auto& [name, tensor] : names_) {
    // Of several names of one tensor (tied weights) the first counts.
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    named.names.push_back(name);
    named.parameters.push_back(tensor);
  }
  Take(named);
}

void GradientReducer::Impl::Scan(const torch::optim::Optimizer& optimizer) {
  // Looks at every parameter in every step: hardly more than a comparison each.
  std::size_t at = 0;
  bool same = true;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      same = same && at < scanned_.size() && scanned_[at] == parameter.unsafeGetTensorImpl();
      ++at;
    }
  }
  if (taken_ && same && at == scanned_.size()) return;
  if (taken_) NameAdded(optimizer);
  Take(MatchNames(optimizer, names_));
  taken_ = true;
  scanned_.clear();
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      scanned_.push_back(parameter.unsafeGetTensorImpl());
    }
  }
}

// Parameters that nobody has named are called in the order in which they were added.
void GradientReducer::Impl::NameAdded(const torch::optim::Optimizer& optimizer) {
  std::unordered_set<const void*> known;
  for (const auto& [name, tensor] : names_) known.insert(tensor.unsafeGetTensorImpl());
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!known.insert(parameter.unsafeGetTensorImpl()).second) continue;
      names_.emplace_back("added parameter " + std::to_string(++added_), parameter);
    }
  }
}

// ---- averaging ----

const ParameterGradient* GradientReducer::Impl::FirstOutstanding() const {
  const auto found = std::find_if(members_.begin(), members_.end(), [](const GradientPtr& member) {
    return member->gate().reported();
  });
  return found == members_.end() ? nullptr : found->get();
}

bool GradientReducer::Impl::AnyTouched() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const GradientPtr& member) { return member->gate().touched(); });
}

void GradientReducer::Impl::SubmitMissing() {
  for (const GradientPtr& member : members_) {
    if (member->gate().reported()) continue;
    member->Attach();
    if (!member->takes_part()) continue;
    member->gate().Report();
    member->Submit(/*will_wait=*/true);
  }
}

void GradientReducer::Impl::Synchronize() {
  CheckSession();
  std::exception_ptr first_error;
  try {
    SubmitMissing();
  } catch (...) {
    // The group has failed, or memory is short; what was accepted is waited for all the same.
    first_error = std::current_exception();
  }
  for (const GradientPtr& member : members_) {
    if (!member->gate().reported()) continue;
    try {
      ThrowIfError(member->Finish());
    } catch (...) {
      if (!first_error) first_error = std::current_exception();
    }
  }
  if (first_error) std::rethrow_exception(first_error);
  synchronized_ = true;
}

void GradientReducer::Impl::SynchronizeUnlessDone() {
  if (rule_->of_steps()) return;
  if (!synchronized_ || AnyTouched()) Synchronize();
}

// At the first gradient of a backward: the rest is done when it ends, on the thread that called it.
void GradientReducer::Impl::OnSubmitted() {
  if (backward_ends_.exchange(true)) return;
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    const auto alive = self.lock();
    if (!alive) return;
    alive->EndBackward();
  });
}

void GradientReducer::Impl::EndBackward() {
  backward_ends_ = false;
  CheckParametersWhenDue();
  Synchronize();
  AfterStep();
}

void GradientReducer::Impl::BeforeStep(const torch::optim::Optimizer& optimizer,
                                       bool with_closure) {
  const ParameterGradient* const outstanding = FirstOutstanding();
  if (skips_ > 0) {
    if (outstanding != nullptr) {
      ThrowOutstanding("step() in a scope of skip_synchronize()", *outstanding,
                       "call synchronize() before it", *set_.session);
    }
    if (!with_closure) return;
    ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                             "step() with a closure in a scope of skip_synchronize(): the closure "
                             "makes gradients, which have to be averaged"));
  }
  if (with_closure && outstanding != nullptr) {
    ThrowOutstanding("step() with a closure", *outstanding,
                     "a closure makes the gradients itself; call step() without one, or backward() "
                     "only within it",
                     *set_.session);
  }
  Scan(optimizer);
  CheckParametersWhenDue();
  if (!with_closure) SynchronizeUnlessDone();
}

at::Tensor GradientReducer::Impl::Step(const torch::optim::Optimizer& optimizer,
                                       LossClosure closure, const BaseStep& base_step) {
  BeforeStep(optimizer, closure != nullptr);
  if (rule_->of_steps()) return CombinedStep(std::move(closure), base_step);
  at::Tensor loss = base_step(closure ? Wrap(std::move(closure)) : nullptr);
  AfterStep();
  return loss;
}

at::Tensor GradientReducer::Impl::CombinedStep(LossClosure closure, const BaseStep& base_step) {
  StepDeltas deltas(set_);
  for (const GradientPtr& member : members_) {
    member->Attach();
    if (member->takes_part()) deltas.Remember(member->key(), member->parameter());
  }
  at::Tensor loss;
  try {
    loss = base_step(std::move(closure));
  } catch (...) {
    // What half a step has changed is of no use to the others.
    deltas.TakeBack();
    throw;
  }
  deltas.Combine();
  return loss;
}

LossClosure GradientReducer::Impl::Wrap(LossClosure closure) {
  return [self = shared_from_this(), closure = std::move(closure)] {
    self->AfterStep();
    at::Tensor loss = closure();
    self->SynchronizeUnlessDone();
    return self->AverageLoss(loss);
  };
}

void GradientReducer::Impl::BeforeZeroGrad(const torch::optim::Optimizer& optimizer) {
  if (const ParameterGradient* const outstanding = FirstOutstanding()) {
    ThrowOutstanding("zero_grad()", *outstanding,
                     "call step() or synchronize() after backward() first; a backward() whose "
                     "gradients this optimizer has no use for goes into a scope of its no_sync()",
                     *set_.session);
  }
  Scan(optimizer);
  StartAnew();
}

void GradientReducer::Impl::CheckParametersWhenDue() {
  if (check_every_ == 0 || steps_++ % check_every_ != 0) return;
  std::vector<std::string> names;
  std::vector<at::Tensor> parameters;
  for (const GradientPtr& member : members_) {
    names.push_back(member->name());
    parameters.push_back(member->parameter());
  }
  CheckEqual("check_parameters of the " + what_, names, parameters, set_);
}

void GradientReducer::Impl::BeforeForward() {
  // Activation checkpointing runs parts of the forward pass anew within backward().
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  if (FirstOutstanding() != nullptr) EndBackward();
  for (const GradientPtr& member : members_) member->Attach();
}

void GradientReducer::Impl::StartAnew() {
  AfterStep();
  for (const GradientPtr& member : members_) {
    member->gate().Reset();
    member->Attach();
  }
}

at::Tensor GradientReducer::Impl::AverageLoss(const at::Tensor& loss) {
  TensorCall call;
  call.tensor = loss;
  call.name = prefix_ + "loss of the closure";
  call.process_set = set_.process_set;
  call.reduction = core::ReduceOp::kAverage;
  call.will_wait = true;
  return PendingTensor::Start(std::move(call), set_.session)->Synchronize();
}

Scope GradientReducer::Impl::NoSync() {
  for (const GradientPtr& member : members_) member->gate().Hold();
  return Scope([held = members_] {
    for (const GradientPtr& gradient : held) gradient->gate().Release();
  });
}

Scope GradientReducer::Impl::SkipSynchronize() {
  if (rule_->of_steps() && active()) {
    ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                             "skip_synchronize(): with op Adasum step() combines what the steps of "
                             "all ranks have changed, and no gradients are averaged before it"));
  }
  ++skips_;
  return Scope([self = shared_from_this()] { --self->skips_; });
}

// ---- the border to the header ----

GradientSynchronizer::~GradientSynchronizer() = default;

GradientReducer::GradientReducer(const torch::optim::Optimizer& optimizer,
                                 NamedTensors named_parameters,
                                 const DistributedOptimizerOptions& options, const Session& session)
    : impl_(std::make_shared<Impl>(std::move(named_parameters), options,
                                   /*after_backward=*/false, StateOf(session))) {
  impl_->Scan(optimizer);
}

GradientReducer::GradientReducer(NamedTensors parameters,
                                 const DistributedOptimizerOptions& options, const Session& session)
    : impl_(std::make_shared<Impl>(std::move(parameters), options, /*after_backward=*/true,
                                   StateOf(session))) {
  impl_->TakeAll();
}

GradientReducer::GradientReducer(GradientReducer&&) noexcept = default;
GradientReducer& GradientReducer::operator=(GradientReducer&&) noexcept = default;
GradientReducer::~GradientReducer() = default;

GradientReducer::Impl& GradientReducer::impl() const {
  if (impl_) return *impl_;
  ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                           "the optimizer is empty: it was moved from"));
}

at::Tensor GradientReducer::Step(const torch::optim::Optimizer& optimizer, LossClosure closure,
                                 const BaseStep& base_step) {
  impl().CheckSession();
  if (!impl_->active()) return base_step(std::move(closure));
  return impl_->Step(optimizer, std::move(closure), base_step);
}

void GradientReducer::SkipStep() {
  if (impl().active()) impl_->AfterStep();
}

void GradientReducer::Synchronize(const torch::optim::Optimizer& optimizer) {
  impl().CheckSession();
  if (!impl_->active()) return;
  impl_->Scan(optimizer);
  impl_->SynchronizeUnlessDone();
}

void GradientReducer::BeforeZeroGrad(const torch::optim::Optimizer& optimizer) {
  impl().CheckSession();
  if (impl_->active()) impl_->BeforeZeroGrad(optimizer);
}

Scope GradientReducer::NoSync() { return impl().NoSync(); }
Scope GradientReducer::SkipSynchronize() { return impl().SkipSynchronize(); }
void GradientReducer::BeforeForward() { impl().BeforeForward(); }
const std::string& GradientReducer::prefix() const { return impl().prefix(); }
Session GradientReducer::session() const { return Session(impl().set().session); }
ProcessSet GradientReducer::process_set() const { return impl().set().process_set; }
bool GradientReducer::has_local_gradients() const { return impl().has_local_gradients(); }

}  // namespace sirtaki::detail
