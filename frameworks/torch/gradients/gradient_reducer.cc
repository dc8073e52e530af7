#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include "core/base/log.h"
#include "core/base/text.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/gradient_members.h"
#include "frameworks/torch/gradients/gradient_rule.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/gradients/step_deltas.h"
#include "frameworks/torch/gradients/step_tuner.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/equality.h"
#include "frameworks/torch/tensors/throw.h"
#include "session/session_observability.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::detail {

using LossClosure = GradientReducer::LossClosure;
using BaseStep = GradientReducer::BaseStep;

// In a set of one rank it has no members: there is nothing to do, but to make gradients dense.
class GradientReducer::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(NamedTensors names, const DistributedOptimizerOptions& options, bool after_backward,
       const std::shared_ptr<SessionState>& session);

  // As those of its members.
  void Scan(const torch::optim::Optimizer& optimizer);
  void TakeAll();

  void CheckSession() const;
  bool active() const { return set_.size() > 1 || rule_->sparse_as_dense; }
  at::Tensor Step(const torch::optim::Optimizer& optimizer, LossClosure closure,
                  const BaseStep& base_step);
  void AfterStep() { synchronized_ = false; }
  void Synchronize();
  void SynchronizeUnlessDone();
  void BeforeZeroGrad(const torch::optim::Optimizer& optimizer);
  void BeforeForward();
  void BeginBackward();
  Scope NoSync();
  Scope SkipSynchronize();
  bool is_reducing() const { return FirstOutstanding() != nullptr; }
  bool has_local_gradients() const { return active() && rule_->of_steps(); }
  const SessionSet& set() const { return set_; }
  core::trace::StepClock& steps() const { return set_.session->session().observation().steps(); }
  const std::string& prefix() const { return members_.prefix(); }

 private:
  std::string WhyNotTuned() const;
  void BeforeStep(const torch::optim::Optimizer& optimizer, bool with_closure);
  void MakeDense() const;
  at::Tensor CombinedStep(LossClosure closure, const BaseStep& base_step);
  LossClosure Wrap(LossClosure closure);
  at::Tensor AverageLoss(const at::Tensor& loss);
  void EndBackward();
  const ParameterGradient* FirstOutstanding() const;
  bool AnyTouched() const;
  std::vector<GradientPtr> MatesOfShared() const;
  void SubmitMissing(const std::vector<GradientPtr>& mates);
  static void SubmitUnlessReported(const GradientPtr& member);
  void StartAnew();
  void CheckParametersWhenDue();

  const SessionSet set_;
  const std::shared_ptr<const GradientRule> rule_;
  const int number_;  // of the optimizer in its set
  GradientMembers members_;
  GradientBuckets buckets_;
  std::optional<StepTuner> tuner_;  // of the option autotune, with one optimizer
  // All gradients are averaged, and no step has used them yet.
  bool synchronized_ = false;
  const std::int64_t check_every_;  // steps; 0: never
  std::int64_t steps_ = 0;
  int skips_ = 0;  // scopes of skip_synchronize
  // The number of the backward at whose end a call is on order; 0: of none.
  std::atomic<std::uint64_t> ending_{0};
  std::atomic<std::uint64_t> backwards_{0};
};

namespace {

// The first gradient that is still under way, in an error's words.
[[noreturn]] void ThrowOutstanding(const std::string& what, const ParameterGradient& first,
                                   const std::string& cure, const SessionState& session) {
  ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                           what + " was called while gradients are being reduced (" +
                               core::Quoted(first.name()) + " is the first): " + cure,
                           core::Origin{session.topology().rank, "", first.key()}));
}

}  // namespace

GradientReducer::Impl::Impl(NamedTensors names, const DistributedOptimizerOptions& options,
                            bool after_backward, const std::shared_ptr<SessionState>& session)
    : set_(session, options.process_set()),
      rule_(std::make_shared<const GradientRule>(MakeRule(options, after_backward, set_.size()))),
      number_(set_.session->NextOptimizerNumber(set_.members.set)),
      members_(GradientMembers::Describe(std::move(names), options, after_backward, number_), set_,
               rule_),
      buckets_(set_, number_, members_.prefix(), rule_),
      check_every_(options.check_parameters_every()) {
  const bool first = number_ == 1 && set_.members.set == core::kWorldSet;
  if (!first || !set_.session->session().config().autotune) return;
  const std::string why_not = WhyNotTuned();
  if (why_not.empty()) {
    tuner_.emplace(set_);
  } else if (set_.rank() == set_.first()) {
    core::LogAnswer("autotune is off: " + why_not);
  }
}

std::string GradientReducer::Impl::WhyNotTuned() const {
  if (set_.size() == 1) return "a job of one rank reduces no gradients";
  if (rule_->of_steps()) return "the first optimizer has op Adasum, which reduces no gradients";
  // What is found depends on times, and would decide which gradients are reduced together.
  if (set_.session->session().config().deterministic) {
    return "with the option deterministic sizes must not depend on measured times";
  }
  return {};
}

void GradientReducer::Impl::Scan(const torch::optim::Optimizer& optimizer) {
  if (members_.Scan(optimizer)) buckets_.Renew();
}

void GradientReducer::Impl::TakeAll() {
  members_.TakeAll();
  for (const GradientPtr& member : members_.all()) {
    member->set_on_submitted([self = weak_from_this()] {
      if (const auto alive = self.lock()) alive->BeginBackward();
    });
  }
}

void GradientReducer::Impl::CheckSession() const {
  if (set_.session->gone()) {
    ThrowStatus(core::Status(core::StatusCode::kNotInitialized,
                             "the optimizer's session was shut down; make a new one after init()"));
  }
}

// ---- averaging ----

const ParameterGradient* GradientReducer::Impl::FirstOutstanding() const {
  const auto found =
      std::find_if(members_.all().begin(), members_.all().end(),
                   [](const GradientPtr& member) { return member->gate().reported(); });
  return found == members_.all().end() ? nullptr : found->get();
}

bool GradientReducer::Impl::AnyTouched() const {
  return std::any_of(members_.all().begin(), members_.all().end(),
                     [](const GradientPtr& member) { return member->gate().touched(); });
}

void GradientReducer::Impl::SubmitUnlessReported(const GradientPtr& member) {
  if (member->gate().reported()) return;
  member->Attach();
  if (!member->takes_part()) return;
  member->gate().Report();
  member->Submit(/*will_wait=*/true);
}

// All gradients of those buckets that belong to the optimizer that had the gradients first.
std::vector<GradientPtr> GradientReducer::Impl::MatesOfShared() const {
  std::vector<GradientPtr> mates;
  for (const GradientPtr& member : members_.all()) {
    if (!member->shared()) continue;
    for (GradientPtr& mate : member->BucketMates()) mates.push_back(std::move(mate));
  }
  return mates;
}

void GradientReducer::Impl::SubmitMissing(const std::vector<GradientPtr>& mates) {
  for (const GradientPtr& member : members_.all()) SubmitUnlessReported(member);
  for (const GradientPtr& member : mates) SubmitUnlessReported(member);
  for (const GradientPtr& member : buckets_.gradients()) SubmitUnlessReported(member);
}

void GradientReducer::Impl::Synchronize() {
  CheckSession();
  members_.CheckStreams();
  std::exception_ptr first_error;
  const auto attempt = [&first_error](const auto& call) {
    try {
      call();
    } catch (...) {
      if (!first_error) first_error = std::current_exception();
    }
  };
  GpuWaits waits;
  const auto finish = [&](const GradientPtr& member) {
    if (member->gate().reported()) attempt([&] { ThrowIfError(member->Finish(waits)); });
  };
  // If the group has failed, or memory is short, what was accepted is waited for all the same.
  const std::vector<GradientPtr> mates = MatesOfShared();
  attempt([&] { SubmitMissing(mates); });
  for (const GradientPtr& member : members_.all()) finish(member);
  for (const GradientPtr& member : mates) {
    finish(member);
    member->TakeOut();  // on all ranks, now that nothing of the bucket is outstanding
  }
  for (const GradientPtr& member : buckets_.gradients()) finish(member);
  attempt([this] { buckets_.Update(members_.all()); });
  attempt([this] { members_.CheckResults(); });
  if (first_error) std::rethrow_exception(first_error);
  synchronized_ = true;
}

void GradientReducer::Impl::SynchronizeUnlessDone() {
  if (rule_->of_steps()) return;
  if (!synchronized_ || AnyTouched()) Synchronize();
}

// At the first gradient of a backward, or before it: the rest is done when that backward ends, on
// the thread that finishes it. With gradients on a GPU that is autograd's of the GPU, for which
// other backwards wait then.
void GradientReducer::Impl::BeginBackward() {
  if (ending_ != 0) return;
  std::uint64_t none = 0;
  const std::uint64_t number = ++backwards_;
  if (!ending_.compare_exchange_strong(none, number)) return;
  // Autograd drops the call of a backward that fails, and this with it.
  const std::shared_ptr<void> order(nullptr, [self = weak_from_this(), number](void*) {
    std::uint64_t mine = number;
    if (const auto alive = self.lock()) alive->ending_.compare_exchange_strong(mine, 0);
  });
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this(), order] {
    if (const auto alive = self.lock()) alive->EndBackward();
  });
}

void GradientReducer::Impl::EndBackward() {
  ending_ = 0;
  if (FirstOutstanding() == nullptr) return;  // in no_sync, or it made gradients of other tensors
  steps().BeginStep();
  CheckParametersWhenDue();
  Synchronize();
  AfterStep();
  steps().EndStep();
  if (tuner_) tuner_->AfterStep();
}

void GradientReducer::Impl::BeforeStep(const torch::optim::Optimizer& optimizer,
                                       bool with_closure) {
  const ParameterGradient* const outstanding = FirstOutstanding();
  if (skips_ > 0) {
    if (outstanding != nullptr) {
      ThrowOutstanding("step() in a scope of skip_synchronize()", *outstanding,
                       "call synchronize() before it", *set_.session);
    }
    if (!with_closure) return members_.CheckResults();
    ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                             "step() with a closure was called in a scope of skip_synchronize(): "
                             "the closure makes gradients, which have to be averaged"));
  }
  if (with_closure && outstanding != nullptr) {
    ThrowOutstanding("step() with a closure", *outstanding,
                     "a closure makes the gradients itself; call step() without one, or call "
                     "backward() in it only",
                     *set_.session);
  }
  Scan(optimizer);
  CheckParametersWhenDue();
  if (!with_closure) SynchronizeUnlessDone();
  // GPU results of the previous step were only known to be launched; report their errors now.
  members_.CheckResults();
}

at::Tensor GradientReducer::Impl::Step(const torch::optim::Optimizer& optimizer,
                                       LossClosure closure, const BaseStep& base_step) {
  BeforeStep(optimizer, closure != nullptr);
  if (rule_->of_steps()) return CombinedStep(std::move(closure), base_step);
  at::Tensor loss = base_step(closure ? Wrap(std::move(closure)) : nullptr);
  AfterStep();
  if (tuner_) tuner_->AfterStep();
  return loss;
}

void GradientReducer::Impl::MakeDense() const {
  for (const GradientPtr& member : members_.all()) {
    at::Tensor& gradient = member->parameter().mutable_grad();
    if (gradient.defined() && gradient.is_sparse()) gradient = gradient.to_dense();
  }
}

at::Tensor GradientReducer::Impl::CombinedStep(LossClosure closure, const BaseStep& base_step) {
  if (rule_->sparse_as_dense) {
    MakeDense();
    if (closure) {
      closure = [this, evaluate = std::move(closure)] {
        at::Tensor loss = evaluate();
        MakeDense();
        return loss;
      };
    }
  }
  if (set_.size() == 1) return base_step(std::move(closure));
  StepDeltas deltas(set_);
  for (const GradientPtr& member : members_.all()) {
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
                     "call step() or synchronize() after backward() first; put a backward() whose "
                     "gradients this optimizer does not use into a scope of its no_sync()",
                     *set_.session);
  }
  Scan(optimizer);
  StartAnew();
}

void GradientReducer::Impl::CheckParametersWhenDue() {
  if (check_every_ == 0) return;
  members_.CheckStreams();  // before it counts: it may be tried again
  if (steps_++ % check_every_ != 0) return;
  std::vector<std::string> names;
  std::vector<at::Tensor> parameters;
  for (const GradientPtr& member : members_.all()) {
    names.push_back(member->name());
    parameters.push_back(member->parameter());
  }
  CheckEqual("check_parameters of the " + members_.what(), names, parameters, set_);
}

void GradientReducer::Impl::BeforeForward() {
  // Activation checkpointing runs parts of the forward pass anew within backward().
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  EndBackward();  // of one that has failed
  for (const GradientPtr& member : members_.all()) member->Attach();
}

void GradientReducer::Impl::StartAnew() {
  AfterStep();
  for (const GradientPtr& member : members_.all()) {
    member->gate().Reset();
    member->Attach();
  }
}

at::Tensor GradientReducer::Impl::AverageLoss(const at::Tensor& loss) {
  TensorCall call;
  call.tensor = loss;
  call.name = "#the mean loss of the closure, for " + prefix().substr(0, prefix().size() - 1);
  call.derived_name = true;
  call.process_set = set_.process_set;
  call.reduction = core::ReduceOp::kAverage;
  call.will_wait = true;
  return PendingTensor::Start(std::move(call), set_.session)->Synchronize();
}

Scope GradientReducer::Impl::NoSync() {
  for (const GradientPtr& member : members_.all()) member->gate().Hold();
  return Scope([held = members_.all()] {
    for (const GradientPtr& gradient : held) gradient->gate().Release();
  });
}

Scope GradientReducer::Impl::SkipSynchronize() {
  if (rule_->of_steps() && active()) {
    ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                             "skip_synchronize() does not go with op Adasum: step() combines what "
                             "the ranks' steps have changed, and averages no gradients before it"));
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
  core::trace::StepClock& steps = impl_->steps();
  steps.BeginStep();
  at::Tensor loss = impl_->active() ? impl_->Step(optimizer, std::move(closure), base_step)
                                    : base_step(std::move(closure));
  steps.EndStep();
  return loss;
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
void GradientReducer::BeforeForward() {
  impl().CheckSession();
  impl_->BeforeForward();
}
void GradientReducer::BeginBackward() { impl().BeginBackward(); }
const std::string& GradientReducer::prefix() const { return impl().prefix(); }
Session GradientReducer::session() const { return Session(impl().set().session); }
ProcessSet GradientReducer::process_set() const { return impl().set().process_set; }
bool GradientReducer::is_reducing() const { return impl().is_reducing(); }
bool GradientReducer::has_local_gradients() const { return impl().has_local_gradients(); }

}  // namespace sirtaki::detail
