// A GradientReducer consists of this, for the files that make it up only: gradient_reducer.cc has its
// steps, gradient_reducer_average.cc what happens at the end of a backward() and in synchronize(),
// gradient_reducer_interface.cc what the public header declares.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <typeinfo>
#include <vector>

#include "frameworks/torch/calls/gpu_tensors.h"
#include "frameworks/torch/gradients/gradient_buckets.h"
#include "frameworks/torch/gradients/gradient_members.h"
#include "frameworks/torch/gradients/gradient_rule.h"
#include "frameworks/torch/gradients/optimizer_shards.h"
#include "frameworks/torch/gradients/parameter_gradient.h"
#include "frameworks/torch/gradients/step_tuner.h"
#include "frameworks/torch/session/backward_ends.h"
#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/state/fused_step.h"
#include "session/session_observability.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::detail {

using LossClosure = GradientReducer::LossClosure;
using BaseStep = GradientReducer::BaseStep;

// The reducer of a set of one rank has members only to make gradients dense, and to check what the
// end of a backward() checks with more ranks.
class GradientReducer::Impl : public AveragedAtEnd, public std::enable_shared_from_this<Impl> {
 public:
  // `optimizer`: null: it is of a module. `type`: the class that the optimizer had when it was made
  // into a DistributedOptimizer, which is another one.
  Impl(NamedTensors names, const DistributedOptimizerOptions& options,
       const torch::optim::Optimizer* optimizer, const std::type_info* type,
       const std::shared_ptr<SessionState>& session);

  // These two do what the members' functions of the same names do, and make this one an owner of the
  // gradients.
  void Scan(const torch::optim::Optimizer& optimizer);
  void TakeAll();

  void CheckSession() const;
  bool active() const { return members_.active(); }
  at::Tensor Step(torch::optim::Optimizer& optimizer, LossClosure closure,
                  const BaseStep& base_step);
  // Returns what makes the step in the place of the optimizer's own; null without the option fused.
  BaseStep FusedStepFor(torch::optim::Optimizer& optimizer) const;
  void CutParameters(const torch::optim::Optimizer& optimizer);
  void BeginStep();
  void AfterStep();
  // `in_step`: the program may have changed gradients since backward(), as by clipping.
  void SynchronizeUnlessDone(bool in_step);
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
  void LogMemory(const torch::optim::Optimizer& optimizer, const std::string& when) const;
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
  void AwaitEnds() const;
  void EndFailed();
  void StartAnew();
  void CountFromJoin();
  void CheckParametersWhenDue();

  // An average ends with the first error, and says whether a backward() has thrown on another rank.
  struct Outcome {
    std::exception_ptr error;
    bool threw_elsewhere = false;
  };
  // An average, from BeginAverage to EndAverage.
  struct UnderWay {
    std::vector<GradientPtr> mates;  // of shared gradients, in their buckets
    std::vector<GradientPtr> outstanding;
    GpuWaits waits;
    bool refuses_late = false;
    bool refused_some = false;  // because a backward() has thrown
    Outcome outcome;
  };
  template <class Call>
  void Attempt(const Call& call);
  // `only_late`: of those that the average of this step did not have. `refuses_late`: gradients whose
  // hooks came behind their backward() are errors.
  void BeginAverage(bool only_late = false, bool refuses_late = false);
  Outcome EndAverage();
  // A backward() has thrown when all gradients had been submitted: the other ranks do not know.
  enum class Untold : std::uint8_t {
    kNothing,
    kGoesOnAround,  // where others have refused a gradient, the one around it throws as theirs do
    kUnheard,       // they have made their step, and the next average tells them
  };
  void NoteUntold(bool outermost) {
    untold_ = outermost ? Untold::kUnheard : Untold::kGoesOnAround;
  }
  // Forget gives true if it was so.
  bool Forget(Untold what) { return untold_.compare_exchange_strong(what, Untold::kNothing); }

  const SessionSet set_;
  const std::shared_ptr<const GradientRule> rule_;
  GradientMembers members_;
  GradientBuckets buckets_;
  FusedStep fused_step_ = nullptr;           // of the option fused
  std::shared_ptr<OptimizerShards> shards_;  // of the option shard, with more than one rank
  std::optional<StepTuner> tuner_;           // of the option autotune, with one optimizer
  bool scanned_ = false;  // what the members are was taken in; not if something could not be cut
  struct ThisStep {
    // All gradients are averaged, and no step has used them yet.
    bool synchronized = false;
    // The gradients of parameters that came after that. synchronize() averages these alone, and step()
    // all again: the program may have clipped each rank's with those.
    std::vector<GradientPtr> late;
    std::uint32_t averages = 0;
    std::vector<std::uint64_t> averages_before;  // of each member's gradient, when it began
    bool timed = false;                          // its backward pass was
  };
  ThisStep step_;
  std::int64_t steps_ = 0;  // as parameters are checked, since the last join
  std::uint64_t joins_before_ = 0;
  std::int64_t steps_made_ = 0;
  // A module ends its step in the next forward(), where it may wait: at the end of a backward() the
  // ranks may have met several modules in different orders.
  bool step_ends_ = false;
  int skips_ = 0;      // scopes of skip_synchronize
  bool held_ = false;  // there was a scope of no_sync since the last average
  int passes_ = 0;     // backward() since the last average, in no scope of no_sync
  std::optional<UnderWay> under_way_;
  // How many backward() have thrown whose averages were not collected. The first was submitted when
  // it threw.
  std::atomic<int> failed_ends_{0};
  std::mutex failed_mutex_;  // of who submits and collects them
  std::atomic<Untold> untold_{Untold::kNothing};
};

}  // namespace sirtaki::detail
