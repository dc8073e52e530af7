#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/base/text.h"
#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/gradient_form.h"
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

// In a set of one rank it has members only to make gradients dense, and to check what the end of a
// backward() checks with more ranks.
class GradientReducer::Impl : public AveragedAtEnd, public std::enable_shared_from_this<Impl> {
 public:
  Impl(NamedTensors names, const DistributedOptimizerOptions& options, bool of_module,
       const std::shared_ptr<SessionState>& session);

  // As those of its members.
  void Scan(const torch::optim::Optimizer& optimizer);
  void TakeAll();

  void CheckSession() const;
  bool active() const { return set_.size() > 1 || rule_->sparse_as_dense || rule_->at_backward; }
  at::Tensor Step(const torch::optim::Optimizer& optimizer, LossClosure closure,
                  const BaseStep& base_step);
  void BeginStep();
  void AfterStep();
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

  // ---- the end of a backward() ----
  void BeginEnd() override;
  bool CollectEnd(bool wait) override;
  void WaitABit() override;
  void ConcludeEnd() override;
  void FailEnd() noexcept override;
  void BeginAgain() override {
    if (failed_) EndFailed();
  }

 private:
  std::string WhyNotTuned() const;
  void BeforeStep(const torch::optim::Optimizer& optimizer, bool with_closure);
  void MakeDense() const;
  at::Tensor CombinedStep(LossClosure closure, const BaseStep& base_step);
  LossClosure Wrap(LossClosure closure);
  at::Tensor AverageLoss(const at::Tensor& loss);
  const ParameterGradient* FirstOutstanding() const;
  bool AnyTouched() const;
  void NoteAverages();
  bool IsDone(std::size_t index) const;
  // The ranks agree on which average of its step each is.
  bool counts_averages() const { return rule_->at_backward && !rule_->of_module; }
  std::vector<GradientPtr> MatesOfShared() const;
  void SubmitMissing();
  static void SubmitUnlessReported(const GradientPtr& member, const std::string& refused);
  template <class Call>
  void Attempt(const Call& call);
  void Average();
  void BeginAverage();
  void EndAverage();
  void AwaitEnds() const;
  void EndFailed();
  std::string WhyNotAgain() const;
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
  int skips_ = 0;                               // scopes of skip_synchronize
  std::uint32_t averages_ = 0;                  // of this step
  std::vector<std::uint64_t> averages_before_;  // of each member's gradient, when it began
  bool held_ = false;                // there was a scope of no_sync since the last average
  int passes_ = 0;                   // backward() since the last average, in no scope of no_sync
  bool timed_ = false;               // the backward pass of this step was
  bool ends_now_ = false;            // the end that was begun averages
  std::atomic<bool> failed_{false};  // a backward() has thrown, and what it left was not collected
  // What is under way, from BeginAverage to EndAverage.
  std::vector<GradientPtr> mates_;
  std::vector<GradientPtr> outstanding_;
  std::optional<GpuWaits> waits_;
  std::exception_ptr first_error_;
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
                            bool of_module, const std::shared_ptr<SessionState>& session)
    : set_(session, options.process_set()),
      rule_(std::make_shared<const GradientRule>(MakeRule(options, of_module, set_.size()))),
      number_(set_.session->NextOptimizerNumber(set_.members.set)),
      members_(GradientMembers::Describe(std::move(names), options, of_module, number_), set_,
               rule_),
      buckets_(set_, number_, members_.prefix(), rule_),
      check_every_(options.check_parameters_every()) {
  // A module does not know of steps, and counts none.
  if (counts_averages()) members_.round() = 1;
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
  if (!members_.Scan(optimizer)) return;
  buckets_.Renew();
  if (!rule_->at_backward) return;
  NoteAverages();
  for (const GradientPtr& member : members_.all()) member->AddOwner(weak_from_this());
}

void GradientReducer::Impl::TakeAll() {
  members_.TakeAll();
  for (const GradientPtr& member : members_.all()) member->AddOwner(weak_from_this());
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

void GradientReducer::Impl::SubmitUnlessReported(const GradientPtr& member,
                                                 const std::string& refused) {
  if (member->gate().reported()) return;
  member->Attach();
  if (!member->takes_part()) return;
  member->gate().Report();
  if (refused.empty()) {
    member->Submit(/*will_wait=*/true);
  } else {
    member->Refuse(refused);
  }
}

// Each gradient as it is when a step begins.
void GradientReducer::Impl::NoteAverages() {
  averages_before_.clear();
  for (const GradientPtr& member : members_.all()) averages_before_.push_back(member->averages());
}

// Another optimizer of this parameter has averaged it with the average that is due here, in the
// same backward() or, on a rank that ran none, in its synchronize().
bool GradientReducer::Impl::IsDone(std::size_t index) const {
  const GradientPtr& member = members_.all()[index];
  if (!member->shared() || !counts_averages() || held_) return false;
  return member->averages() - averages_before_[index] > averages_;
}

// All gradients of those buckets that belong to the optimizer that had the gradients first.
std::vector<GradientPtr> GradientReducer::Impl::MatesOfShared() const {
  std::vector<GradientPtr> mates;
  for (std::size_t i = 0; i < members_.all().size(); ++i) {
    const GradientPtr& member = members_.all()[i];
    if (!member->shared() || IsDone(i)) continue;
    for (GradientPtr& mate : member->BucketMates()) mates.push_back(std::move(mate));
  }
  return mates;
}

template <class Call>
void GradientReducer::Impl::Attempt(const Call& call) {
  try {
    call();
  } catch (...) {
    if (!first_error_) first_error_ = std::current_exception();
  }
}

// Why gradients that hold an average of this step, and are of no second backward(), cannot be
// averaged again; empty if they can, or if there are none.
std::string GradientReducer::Impl::WhyNotAgain() const {
  if (averages_ == 0 || !counts_averages() || rule_->may_repeat()) return {};
  for (const GradientPtr& member : members_.all()) {
    if (!member->gate().reported() && member->parameter().grad().defined())
      return kNoSecondBackward;
  }
  return {};
}

void GradientReducer::Impl::SubmitMissing() {
  const std::string refused =
      failed_ ? std::string(kBackwardThrew) + ", which its error explains; zero_grad() begins again"
              : WhyNotAgain();
  for (std::size_t i = 0; i < members_.all().size(); ++i) {
    if (!IsDone(i)) SubmitUnlessReported(members_.all()[i], refused);
  }
  for (const GradientPtr& member : mates_) SubmitUnlessReported(member, refused);
  for (const GradientPtr& member : buckets_.gradients()) SubmitUnlessReported(member, refused);
}

// If the group has failed, or memory is short, what was accepted is waited for all the same.
void GradientReducer::Impl::BeginAverage() {
  first_error_ = nullptr;
  waits_.emplace();
  mates_ = MatesOfShared();
  Attempt([this] { SubmitMissing(); });
  if (rule_->at_backward) Attempt([this] { buckets_.Ask(members_.all()); });
  outstanding_.clear();
  const auto add = [this](const GradientPtr& member) {
    if (member->gate().reported()) outstanding_.push_back(member);
  };
  for (const GradientPtr& member : members_.all()) add(member);
  for (const GradientPtr& member : mates_) add(member);
  for (const GradientPtr& member : buckets_.gradients()) add(member);
}

bool GradientReducer::Impl::CollectEnd(bool wait) {
  wait = wait || set_.session->gone();  // in a forked child nothing ever comes
  std::erase_if(outstanding_, [&](const GradientPtr& member) {
    if (!member->gate().reported()) return true;  // it was in the list twice
    std::optional<core::Status> status;
    try {
      if (wait) {
        status = member->Finish(*waits_);
      } else if (member->ready()) {
        status = member->Advance(*waits_);
      }
    } catch (...) {
      if (!first_error_) first_error_ = std::current_exception();
      return true;
    }
    if (status) Attempt([&] { ThrowIfError(*status); });
    return status.has_value();
  });
  if (!outstanding_.empty()) return false;
  // On all ranks, now that nothing of these buckets is outstanding, and before anybody makes others.
  for (const GradientPtr& mate : std::exchange(mates_, {})) mate->TakeOut();
  return true;
}

void GradientReducer::Impl::WaitABit() {
  constexpr auto kABit = std::chrono::milliseconds(1);
  for (const GradientPtr& member : outstanding_) {
    const core::HandlePtr handle = member->handle();
    if (!handle || handle->done()) continue;
    (void)set_.session->session().Wait(*handle, core::Clock::now() + kABit);
    return;
  }
  std::this_thread::sleep_for(kABit / 10);
}

void GradientReducer::Impl::EndAverage() {
  if (!rule_->at_backward) Attempt([this] { buckets_.Ask(members_.all()); });
  Attempt([this] { buckets_.Take(members_.all(), /*wait=*/!rule_->at_backward); });
  Attempt([this] { members_.CheckResults(); });
  failed_ = false;
  passes_ = 0;
  waits_.reset();
  if (first_error_) std::rethrow_exception(std::exchange(first_error_, nullptr));
  synchronized_ = true;
  held_ = false;
  ++averages_;
  if (counts_averages()) members_.round() = averages_ + 1;
}

// On this thread, for this optimizer alone.
void GradientReducer::Impl::Average() {
  members_.CheckStreams();
  BeginAverage();
  CollectEnd(/*wait=*/true);
  EndAverage();
}

void GradientReducer::Impl::Synchronize() {
  CheckSession();
  AwaitEnds();
  Average();
}

void GradientReducer::Impl::SynchronizeUnlessDone() {
  if (rule_->of_steps()) return;
  if (!synchronized_ || AnyTouched()) Synchronize();
}

// Before the first gradient of a backward, for a module that knows: its end is this one's, and none
// of those within it averages.
void GradientReducer::Impl::BeginBackward() {
  set_.session->backward_ends().Join(shared_from_this(), /*on_cpu=*/false, /*whole=*/true);
}

void GradientReducer::Impl::BeginEnd() {
  ends_now_ = false;
  const bool reported = FirstOutstanding() != nullptr;
  // Of a module's, in no_sync, or it made gradients of other tensors.
  if (rule_->of_module && !reported) return;
  if (!reported && ++passes_ < rule_->passes) return;
  ends_now_ = true;
  if (!std::exchange(timed_, true) && !(rule_->of_module && rule_->alone)) steps().BeginStep();
  BeginAverage();
  Attempt([this] { members_.CheckStreams(); });
}

void GradientReducer::Impl::ConcludeEnd() {
  if (!std::exchange(ends_now_, false)) return;
  EndAverage();
  if (!rule_->of_module || rule_->alone) return;
  AfterStep();
  CheckParametersWhenDue();
  steps().EndStep();
  if (tuner_) tuner_->AfterStep();
}

// Perhaps on autograd's thread of a GPU, while the program's goes on.
void GradientReducer::Impl::FailEnd() noexcept {
  try {
    if (set_.session->gone() || failed_) return;
    failed_ = true;
    if (!within_another()) BeginAverage();
  } catch (...) {
    core::Log(core::LogLevel::kWarning,
              "a backward() has thrown, and the other ranks could not be told: " + TextOfCurrent());
  }
}

// One that has thrown may not have ended everywhere yet.
void GradientReducer::Impl::AwaitEnds() const {
  if (!within_backward() || torch::autograd::get_current_graph_task_id() != -1) return;
  const core::TimePoint deadline = core::Clock::now() + std::chrono::seconds(30);
  while (within_backward()) {
    if (core::Clock::now() > deadline) {
      ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                               "a backward() of the " + members_.what() +
                                   " runs on another thread, and has not ended for 30 s"));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Takes what a backward() that has thrown has left, which the other ranks wait for as well.
void GradientReducer::Impl::EndFailed() {
  CollectEnd(/*wait=*/true);
  try {
    EndAverage();
  } catch (const std::exception&) {
    // The program has had an error of this.
  }
}

void GradientReducer::Impl::BeforeStep(const torch::optim::Optimizer& optimizer,
                                       bool with_closure) {
  AwaitEnds();
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
  if (!with_closure) {
    // What no backward() has averaged: on all ranks, or it is an error.
    if (counts_averages()) members_.round() = kRoundInStep;
    const Scope counted([this] {
      if (counts_averages()) members_.round() = averages_ + 1;
    });
    SynchronizeUnlessDone();
  }
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

void GradientReducer::Impl::BeginStep() {
  if (!timed_) steps().BeginStep();
}

// The following backward() belong to another step.
void GradientReducer::Impl::AfterStep() {
  synchronized_ = false;
  timed_ = false;
  averages_ = 0;
  if (!counts_averages()) return;
  members_.round() = 1;
  NoteAverages();
}

void GradientReducer::Impl::BeforeZeroGrad(const torch::optim::Optimizer& optimizer) {
  AwaitEnds();
  if (failed_) EndFailed();
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
  AwaitEnds();
  if (failed_) EndFailed();
  for (const GradientPtr& member : members_.all()) member->Attach();
}

void GradientReducer::Impl::StartAnew() {
  AfterStep();
  passes_ = 0;
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
  held_ = true;
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
                                   /*of_module=*/false, StateOf(session))) {
  impl_->Scan(optimizer);
}

GradientReducer::GradientReducer(NamedTensors parameters,
                                 const DistributedOptimizerOptions& options, const Session& session)
    : impl_(std::make_shared<Impl>(std::move(parameters), options, /*of_module=*/true,
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
  impl_->BeginStep();
  at::Tensor loss = impl_->active() ? impl_->Step(optimizer, std::move(closure), base_step)
                                    : base_step(std::move(closure));
  impl_->steps().EndStep();
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
