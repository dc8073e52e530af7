// What a GradientReducer consists of. For the files that make it up only: gradient_reducer.cc has its
// steps, gradient_reducer_average.cc what happens at the end of a backward() and in synchronize().
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/gradients/fused_step.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/gradient_members.h"
#include "frameworks/torch/gradients/gradient_rule.h"
#include "frameworks/torch/gradients/optimizer_shards.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/gradients/step_tuner.h"
#include "frameworks/torch/session/backward_ends.h"
#include "frameworks/torch/session/session_set.h"
#include "session/session_observability.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::detail {

using LossClosure = GradientReducer::LossClosure;
using BaseStep = GradientReducer::BaseStep;

// The reducer of a set of one rank has members only to make gradients dense, and to check what the
// end of a backward() checks with more ranks.
class GradientReducer::Impl : public AveragedAtEnd, public std::enable_shared_from_this<Impl> {
 public:
  // `optimizer`: null: it is of a module.
  Impl(NamedTensors names, const DistributedOptimizerOptions& options,
       const torch::optim::Optimizer* optimizer, const std::shared_ptr<SessionState>& session);

  // These two do what the members' functions of the same names do, and make this one an owner of the
  // gradients.
  void Scan(const torch::optim::Optimizer& optimizer);
  void TakeAll();

  void CheckSession() const;
  bool active() const { return set_.size() > 1 || rule_->sparse_as_dense || rule_->at_backward; }
  at::Tensor Step(torch::optim::Optimizer& optimizer, LossClosure closure,
                  const BaseStep& base_step);
  // What makes the step in the place of the optimizer's own; null without the option fused.
  BaseStep FusedStepFor(torch::optim::Optimizer& optimizer) const;
  void CutParameters(const torch::optim::Optimizer& optimizer);
  void BeginStep();
  void AfterStep();
  void SynchronizeUnlessDone();
  void BeforeZeroGrad(const torch::optim::Optimizer& optimizer);
  void BeforeForward(bool training);
  void BeginBackward();
  Scope NoSync();
  Scope SkipSynchronize();
  bool is_reducing() const { return members_.FirstReported() != nullptr; }
  bool has_local_gradients() const { return active() && rule_->of_steps(); }
  const std::shared_ptr<OptimizerShards>& shards() const { return shards_; }
  const SessionSet& set() const { return set_; }
  core::trace::StepClock& steps() const { return set_.session->session().observation().steps(); }
  const std::string& prefix() const { return members_.prefix(); }

  // ---- the end of a backward() ----
  void BeginEnd() override;
  bool CollectEnd(bool wait) override;
  void WaitABit() override;
  void ConcludeEnd() override;
  void FailEnd(bool outermost) noexcept override;
  void LeaveUnheard() noexcept override;
  void BeginAgain() override { EndFailed(); }

 private:
  std::string WhyNotTuned() const;
  void BeforeStep(const torch::optim::Optimizer& optimizer, bool with_closure);
  void MakeDense() const;
  at::Tensor CombinedStep(LossClosure closure, const BaseStep& base_step);
  at::Tensor ShardedStep(torch::optim::Optimizer& optimizer, LossClosure closure,
                         const BaseStep& base_step);
  LossClosure Wrap(LossClosure closure);
  at::Tensor AverageLoss(const at::Tensor& loss);
  void NoteAverages();
  bool IsDone(std::size_t index) const;
  void BeginCount();
  void SetRound();
  std::vector<GradientPtr> MatesOfShared() const;
  void SubmitUnlessReported(const GradientPtr& member);
  template <class Call>
  void Attempt(const Call& call);
  void BeginAverage();
  void EndAverage();
  void AwaitEnds() const;
  // A backward() has thrown behind all gradients, so the other ranks know nothing of it.
  void NoteUntold(bool outermost) {
    unheard_ = outermost;
    goes_on_around_ = !outermost;
  }
  void EndFailed();
  void StartAnew();
  void CheckParametersWhenDue();

  const SessionSet set_;
  const std::shared_ptr<const GradientRule> rule_;
  const int number_;  // of the optimizer in its set
  GradientMembers members_;
  GradientBuckets buckets_;
  FusedStep fused_step_ = nullptr;           // of the option fused
  std::shared_ptr<OptimizerShards> shards_;  // of the option shard, with more than one rank
  std::optional<StepTuner> tuner_;           // of the option autotune, with one optimizer
  bool scanned_ = false;  // what the members are was taken in; not if something could not be cut
  // All gradients are averaged, and no step has used them yet.
  bool synchronized_ = false;
  const std::int64_t check_every_;  // steps; 0: never
  std::int64_t steps_ = 0;
  // A module ends its step in the next forward(), where it may wait: at the end of a backward() the
  // ranks may have met several modules in different orders.
  bool step_ends_ = false;
  int skips_ = 0;                               // scopes of skip_synchronize
  std::uint32_t averages_ = 0;                  // of this step
  std::vector<std::uint64_t> averages_before_;  // of each member's gradient, when it began
  bool held_ = false;      // there was a scope of no_sync since the last average
  int passes_ = 0;         // backward() since the last average, in no scope of no_sync
  bool timed_ = false;     // the backward pass of this step was
  bool ends_now_ = false;  // the end that was begun averages
  // How many backward() have thrown whose averages were not collected. The first was submitted when
  // it threw.
  std::atomic<int> failed_ends_{0};
  std::mutex failed_mutex_;       // of who submits and collects them
  bool refused_some_ = false;     // of what is under way, because a backward() has thrown
  bool threw_elsewhere_ = false;  // the same, on another rank
  // The backward() that has thrown had submitted everything, and the one around it may go on: if
  // others have refused a gradient, that one must throw as theirs do.
  bool goes_on_around_ = false;
  // A backward() has thrown when all gradients had been submitted: the other ranks do not know, and
  // have made their step. The next average tells them.
  std::atomic<bool> unheard_{false};
  // What is under way, from BeginAverage to EndAverage.
  std::vector<GradientPtr> mates_;
  std::vector<GradientPtr> outstanding_;
  std::optional<GpuWaits> waits_;
  std::exception_ptr first_error_;
};

}  // namespace sirtaki::detail
