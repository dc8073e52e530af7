#include <torch/csrc/autograd/engine.h>

#include <string>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/base/text.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/gradients/gradient_form.h"
#include "frameworks/torch/gradients/gradient_reducer_impl.h"
#include "frameworks/torch/gradients/step_deltas.h"
#include "frameworks/torch/session/session_scope.h"
#include "frameworks/torch/state/equality.h"
#include "frameworks/torch/state/fused_step.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/memory_plan.h"

namespace sirtaki::detail {

namespace {

// The first gradient that is still under way, in an error's words.
[[noreturn]] void ThrowOutstanding(const std::string& what, const ParameterGradient& first,
                                   const std::string& cure, const SessionState& session) {
  ThrowInvalid(what + " was called while gradients are being reduced (" +
                   core::Quoted(first.name()) + " is the first): " + cure,
               core::Origin{session.topology().rank, "", first.key()});
}

}  // namespace

Shard ShardOfJob(Shard of_program) {
  switch (CurrentSession()->session().config().shard) {
    case core::ShardMode::kProgram:
      break;
    case core::ShardMode::kNone:
      return Shard::None;
    case core::ShardMode::kOptimizer:
      return Shard::OptimizerState;
    case core::ShardMode::kGradients:
      return Shard::Gradients;
  }
  return of_program;
}

GradientReducer::Impl::Impl(NamedTensors names, const DistributedOptimizerOptions& options,
                            const torch::optim::Optimizer* optimizer, const std::type_info* type,
                            const std::shared_ptr<SessionState>& session)
    : set_(session, options.process_set()),
      rule_(std::make_shared<const GradientRule>(
          MakeRule(options, optimizer == nullptr, set_.size()))),
      members_(GradientMembers::Describe(std::move(names), options, optimizer, type,
                                         set_.session->NextOptimizerNumber(set_.members.set)),
               set_, rule_),
      buckets_(set_, members_.number(), members_.prefix(), rule_) {
  if (rule_->at_backward) members_.round() = 1;
  if (options.fused() && optimizer != nullptr) fused_step_ = FusedStepOf(*type);
  if (options.shard() != Shard::None && optimizer != nullptr && set_.size() > 1) {
    const bool automatic = options.shard_by() == ShardBy::Auto;
    SessionSet sharing = set_;
    if (options.shard_over() == ShardOver::Host) {
      const SessionScope scope(session);
      sharing = SessionSet(session, local_process_set());
    }
    shards_ = std::make_shared<OptimizerShards>(
        std::move(sharing), members_.what(), automatic ? ChooseShardBy(*type) : options.shard_by(),
        rule_->keeps_shards, options.share_parameters());
    if (rule_->keeps_shards) members_.KeepIn(shards_);
  }
  if (optimizer != nullptr) LogMemory(*optimizer, "before the first step");
  const bool is_first = members_.number() == 1;
  if (!is_first || !set_.session->session().config().autotune) return;
  if (set_.members.set != core::kWorldSet) {  // the limits that are found are those of the job
    if (set_.rank() == 0) {
      core::LogAnswer(
          "autotune makes no trials with an optimizer that averages over a process set, even one "
          "of all ranks");
    }
    return;
  }
  const std::string why_not = WhyNotTuned();
  if (why_not.empty()) {
    tuner_.emplace(set_);
  } else if (set_.rank() == set_.first()) {
    core::LogAnswer("autotune is off: " + why_not);
  }
}

// One rank of each host tells what its ranks take.
void GradientReducer::Impl::LogMemory(const torch::optim::Optimizer& optimizer,
                                      const std::string& when) const {
  if (set_.size() == 1 || !core::LogEnabled(core::LogLevel::kInfo)) return;
  // The optimizer that stands for one of Python's has no options and no state to tell of.
  for (const auto& group : optimizer.param_groups()) {
    if (!group.has_options()) return;
  }
  const std::vector<int>& host_of_rank = set_.session->topology().host_of_rank;
  const auto host = [&](int rank) { return host_of_rank[static_cast<std::size_t>(rank)]; };
  for (const int rank : set_.ranks()) {
    if (rank == set_.rank()) break;
    if (host(rank) == host(set_.rank())) return;
  }
  const SessionScope scope(set_.session);
  core::Log(core::LogLevel::kInfo,
            "memory of " + members_.what() + " " + when + ":\n" + memory_plan(optimizer).text());
}

std::string GradientReducer::Impl::WhyNotTuned() const {
  if (set_.size() == 1) return "a job of one rank reduces no gradients";
  if (rule_->of_steps()) return "the first optimizer has op Adasum, which reduces no gradients";
  // The limits that are found depend on times, and decide which gradients are reduced together.
  if (set_.session->session().config().deterministic) {
    return "with the option deterministic sizes must not depend on measured times";
  }
  return {};
}

void GradientReducer::Impl::Scan(const torch::optim::Optimizer& optimizer) {
  if (!members_.Scan(optimizer) && scanned_) return;
  scanned_ = false;
  // Averages come in any order, and the parameters are cut in that of the optimizer.
  if (rule_->keeps_shards) CutParameters(optimizer);
  // The average of this step did not have what was added behind zero_grad().
  if (step_.synchronized) {
    step_.late.insert(step_.late.end(), members_.added().begin(), members_.added().end());
  }
  buckets_.Renew();
  scanned_ = true;
  if (!rule_->at_backward) return;
  NoteAverages();
  for (const GradientPtr& member : members_.all()) member->AddOwner(weak_from_this());
}

// The ranks have agreed on how the parameters lie in memory: what throws here throws on all.
void GradientReducer::Impl::CutParameters(const torch::optim::Optimizer& optimizer) {
  try {
    shards_->CutParameters(optimizer);
  } catch (const std::invalid_argument& error) {
    ThrowInvalid(error.what());
  }
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

void GradientReducer::Impl::BeforeStep(const torch::optim::Optimizer& optimizer,
                                       bool with_closure) {
  AwaitEnds();
  EndFailed();
  const ParameterGradient* const outstanding = members_.FirstReported();
  if (skips_ > 0) {
    if (outstanding != nullptr) {
      ThrowOutstanding("step() in a scope of skip_synchronize()", *outstanding,
                       "call synchronize() before it", *set_.session);
    }
    if (!with_closure) return members_.CheckResults();
    ThrowInvalid(
        "step() with a closure was called in a scope of skip_synchronize(): "
        "the closure makes gradients, which have to be averaged");
  }
  if (with_closure && outstanding != nullptr) {
    ThrowOutstanding("step() with a closure", *outstanding,
                     "a closure makes the gradients itself; call step() without one, or call "
                     "backward() in it only",
                     *set_.session);
  }
  Scan(optimizer);
  if (!with_closure) {
    // This averages what no backward() has averaged: on all ranks, or it is an error.
    if (rule_->at_backward && untold_ != Untold::kUnheard) members_.round() = kRoundInStep;
    const Scope counted([this] { SetRound(); });
    SynchronizeUnlessDone(/*in_step=*/true);
  }
  // Parameters are checked when all ranks are known to be here: others may wait in backward() for
  // this one.
  CheckParametersWhenDue();
  // GPU results of the previous step were only known to be launched; report their errors now.
  members_.CheckResults();
}

at::Tensor GradientReducer::Impl::Step(torch::optim::Optimizer& optimizer, LossClosure closure,
                                       const BaseStep& base_step) {
  BeforeStep(optimizer, closure != nullptr);
  if (rule_->of_steps()) return CombinedStep(std::move(closure), base_step);
  if (closure) closure = Wrap(std::move(closure));
  at::Tensor loss = shards_ ? ShardedStep(optimizer, std::move(closure), base_step)
                            : base_step(std::move(closure));
  AfterStep();
  if (tuner_) tuner_->AfterStep();
  constexpr std::int64_t kSettled = 3;  // steps, after which memory is what it will be
  if (++steps_made_ == kSettled) LogMemory(optimizer, "after some steps");
  return loss;
}

void GradientReducer::Impl::MakeDense() const {
  for (const GradientPtr& member : members_.all()) {
    at::Tensor& gradient = member->parameter().mutable_grad();
    if (gradient.defined() && gradient.is_sparse()) gradient = gradient.to_dense();
  }
}

BaseStep GradientReducer::Impl::FusedStepFor(torch::optim::Optimizer& optimizer) const {
  if (fused_step_ == nullptr) return nullptr;
  return [fused_step = fused_step_, &optimizer](const LossClosure& closure) {
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode enable_grad(true);
      loss = closure();
    }
    try {
      fused_step(optimizer);
    } catch (const std::invalid_argument& error) {
      ThrowInvalid(error.what());
    }
    return loss;
  };
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
    // Half a step's changes are of no use to the others.
    deltas.TakeBack();
    throw;
  }
  deltas.Combine();
  return loss;
}

at::Tensor GradientReducer::Impl::ShardedStep(torch::optim::Optimizer& optimizer,
                                              LossClosure closure, const BaseStep& base_step) {
  at::Tensor loss;
  if (closure) {
    // The optimizer would call it while the shards are in the place of the parameters.
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  if (const int joined = members_.joined(); joined >= 0) ThrowJoined(joined);
  at::Tensor of_base;
  shards_->Step(optimizer, [&] { of_base = base_step(nullptr); });
  return loss.defined() ? loss : of_base;
}

LossClosure GradientReducer::Impl::Wrap(LossClosure closure) {
  return [self = shared_from_this(), closure = std::move(closure)] {
    self->AfterStep();
    at::Tensor loss = closure();
    self->SynchronizeUnlessDone(/*in_step=*/true);
    return self->AverageLoss(loss);
  };
}

void GradientReducer::Impl::BeginStep() {
  set_.session->session().NoteCaller();
  if (!step_.timed) steps().BeginStep();
}

// The following backward() belong to another step.
void GradientReducer::Impl::AfterStep() {
  step_ = {.averages_before = std::move(step_.averages_before)};  // its memory serves again
  members_.ForgetJoined();
  if (rule_->keeps_shards) shards_->DropGradients();
  BeginCount();
}

void GradientReducer::Impl::BeginCount() {
  step_.averages = 0;
  if (!rule_->at_backward) return;
  SetRound();
  NoteAverages();
}

void GradientReducer::Impl::BeforeZeroGrad(const torch::optim::Optimizer& optimizer) {
  AwaitEnds();
  EndFailed();
  set_.session->session().NoteCaller();
  if (const ParameterGradient* const outstanding = members_.FirstReported()) {
    ThrowOutstanding("zero_grad()", *outstanding,
                     "call step() or synchronize() after backward() first; put a backward() whose "
                     "gradients this optimizer does not use into a scope of its no_sync()",
                     *set_.session);
  }
  Scan(optimizer);
  StartAnew();
  if (shards_) shards_->LetGoOfCopies();
}

// Until a join the ranks may have made different numbers of steps, and some none that has yet to end.
void GradientReducer::Impl::CountFromJoin() {
  const std::uint64_t joins = *set_.session->JoinsOf(set_.members.set);
  if (std::exchange(joins_before_, joins) == joins) return;
  steps_ = 0;
  step_ends_ = false;
}

void GradientReducer::Impl::CheckParametersWhenDue() {
  if (rule_->check_every == 0) return;
  members_.CheckStreams();  // before it counts: it may be tried again
  CountFromJoin();
  if (steps_++ % rule_->check_every != 0) return;
  NamedTensors parameters;
  for (const GradientPtr& member : members_.all()) {
    parameters.emplace_back(member->name(), member->parameter());
  }
  CheckEqual("check_parameters of the " + members_.what(), parameters, set_);
}

void GradientReducer::Impl::BeforeForward(bool training) {
  // Activation checkpointing runs parts of the forward pass anew within backward().
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  set_.session->session().NoteCaller();
  AwaitEnds();
  EndFailed();
  // Evaluation is each rank's own affair.
  if (training) {
    CountFromJoin();
    if (step_ends_ && rule_->check_every > 0) members_.CheckStreams();
    if (std::exchange(step_ends_, false)) {
      CheckParametersWhenDue();
      if (tuner_) tuner_->AfterStep();
    }
    BeginCount();
  }
  for (const GradientPtr& member : members_.all()) member->Attach();
}

void GradientReducer::Impl::StartAnew() {
  AfterStep();
  passes_ = 0;
  held_ = false;
  for (const GradientPtr& member : members_.all()) member->BeginStep();
}

at::Tensor GradientReducer::Impl::AverageLoss(const at::Tensor& loss) {
  TensorCall call = OwnCall(
      core::OpKind::kAllReduce, loss,
      "#the mean loss of the closure, for " + prefix().substr(0, prefix().size() - 1), set_);
  call.derived_name = true;
  call.reduction = core::ReduceOp::kAverage;
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
    ThrowInvalid(
        "skip_synchronize() does not go with op Adasum: step() combines what "
        "the ranks' steps have changed, and averages no gradients before it");
  }
  ++skips_;
  return Scope([self = shared_from_this()] { --self->skips_; });
}

}  // namespace sirtaki::detail
