// How a GradientReducer averages: it submits what is missing, collects what comes in any order, and
// concludes; at the end of a backward() beside others, in synchronize() by itself.
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/threads/cooling_sleep.h"
#include "frameworks/torch/gradients/gradient_form.h"
#include "frameworks/torch/gradients/gradient_reducer_impl.h"
#include "frameworks/torch/tensors/tensor_bridge.h"
#include "frameworks/torch/tensors/throw.h"
#include "sirtaki/error.h"

namespace sirtaki::detail {

void GradientReducer::Impl::SubmitUnlessReported(const GradientPtr& member) {
  if (member->gate().reported()) return;
  member->Attach();
  if (!member->takes_part() || !member->gate().Report()) return;
  if (failed_ends_ > 0) {
    under_way_->refused_some = true;
    member->RefuseAfterThrow();
  } else {
    // A parameter may have been added since.
    member->SubmitMissing(/*averaged=*/step_.averages > 0 && member->has_average(),
                          /*in_step=*/under_way_->refuses_late);
  }
}

// Each gradient as it is when a step begins: it may be shared from the middle of the step on.
void GradientReducer::Impl::NoteAverages() {
  step_.averages_before.clear();
  for (const GradientPtr& member : members_.all())
    step_.averages_before.push_back(member->averages());
}

// The average of this step had it, and is made up for those that it did not have. Or another optimizer
// of this parameter has averaged it with the average that is due here, in the same backward() or, on
// a rank that ran none, in its synchronize().
bool GradientReducer::Impl::IsDone(std::size_t index) const {
  const GradientPtr& member = members_.all()[index];
  if (!step_.late.empty())
    return std::find(step_.late.begin(), step_.late.end(), member) == step_.late.end();
  if (!member->shared() || !rule_->at_backward || held_) return false;
  return member->averages() - step_.averages_before[index] > step_.averages;
}

// All gradients of those buckets that belong to the optimizer that had the gradients first.
std::vector<GradientPtr> GradientReducer::Impl::MatesOfShared() const {
  std::vector<GradientPtr> mates;
  if (!members_.AnyShared()) return mates;
  for (std::size_t i = 0; i < members_.all().size(); ++i) {
    const GradientPtr& member = members_.all()[i];
    if (!member->shared() || IsDone(i)) continue;
    for (GradientPtr& mate : member->BucketMates()) mates.push_back(std::move(mate));
  }
  return mates;
}

template <class Call>
void GradientReducer::Impl::Attempt(const Call& call) {
  Outcome& outcome = under_way_->outcome;
  const auto note = [&outcome] {
    if (!outcome.error) outcome.error = std::current_exception();
  };
  try {
    call();
  } catch (const RefusedError&) {
    note();
    outcome.threw_elsewhere = true;
  } catch (...) {
    note();
  }
}

// If the group has failed, or memory is short, what was accepted is waited for all the same.
void GradientReducer::Impl::BeginAverage(bool only_late, bool refuses_late) {
  step_.synchronized = false;
  if (!only_late) {
    step_.late.clear();
    members_.ForgetJoined();
  }
  UnderWay& now = under_way_.emplace();
  now.refuses_late = refuses_late;
  now.mates = MatesOfShared();
  const auto take = [&](const GradientPtr& member, bool is_done) {
    if (!is_done && !now.outcome.error) Attempt([&] { SubmitUnlessReported(member); });
    if (member->gate().reported()) now.outstanding.push_back(member);
  };
  for (std::size_t i = 0; i < members_.all().size(); ++i) take(members_.all()[i], IsDone(i));
  for (const GradientPtr& mate : now.mates) take(mate, /*is_done=*/false);
  if (buckets_.renews()) {
    // Those in buckets that the optimizer has no more, where none that is late is.
    for (const GradientPtr& mate : buckets_.gradients()) take(mate, /*is_done=*/only_late);
    now.mates.insert(now.mates.end(), buckets_.gradients().begin(), buckets_.gradients().end());
  }
  if (rule_->hook && !now.outcome.error) {
    for (const GradientPtr& member : now.outstanding) Attempt([&] { member->LaunchAlone(); });
  }
  if (rule_->at_backward) Attempt([this] { buckets_.Ask(members_.all()); });
}

bool GradientReducer::Impl::CollectEnd(bool wait) {
  if (!under_way_) return true;
  wait = wait || set_.session->gone();  // in a forked child nothing ever comes
  // A hook's result may communicate and wait: it is called in the same order on all ranks.
  bool in_turn = true;
  std::erase_if(under_way_->outstanding, [&](const GradientPtr& member) {
    if (!member->gate().reported()) return true;  // it was in the list twice
    if (!in_turn) return false;
    bool is_over = true;  // also one that throws
    Attempt([&] {
      std::optional<core::Status> status;
      if (wait) {
        status = member->Finish(under_way_->waits);
      } else if (member->ready()) {
        status = member->Advance(under_way_->waits);
      }
      is_over = status.has_value();
      if (status) ThrowIfError(*status);
    });
    in_turn = is_over || !rule_->hook;
    return is_over;
  });
  if (!under_way_->outstanding.empty()) return false;
  // All ranks do so now that nothing of these buckets is outstanding, and before anybody makes
  // others.
  for (const GradientPtr& mate : std::exchange(under_way_->mates, {})) mate->TakeOut();
  return true;
}

void GradientReducer::Impl::WaitABit() {
  constexpr auto kABit = std::chrono::milliseconds(1);
  for (const GradientPtr& member : under_way_->outstanding) {
    const core::HandlePtr handle = member->handle();
    if (!handle || handle->done()) continue;
    (void)set_.session->session().Wait(*handle, core::Clock::now() + kABit);
    return;
  }
  // The average has come a step further, or has no handle.
  std::this_thread::sleep_for(kABit / 10);
}

GradientReducer::Impl::Outcome GradientReducer::Impl::EndAverage() {
  if (!rule_->at_backward) Attempt([this] { buckets_.Ask(members_.all()); });
  Attempt([this] { buckets_.Take(members_.all(), /*wait=*/!rule_->at_backward); });
  Attempt([this] { members_.CheckResults(); });
  // Averages are noted when all are in their places, since some may share their memory.
  for (const GradientPtr& member : members_.all()) Attempt([&] { member->NoteDelivered(); });
  if (rule_->keeps_shards) shards_->launched().Clear();
  passes_ = 0;
  const Outcome outcome = under_way_->outcome;
  under_way_.reset();
  step_.late.clear();
  // The others know now, or have made no step either.
  if (members_.round() == kRoundAfterThrow || outcome.threw_elsewhere) Forget(Untold::kUnheard);
  if (!outcome.error) {
    step_.synchronized = true;
    held_ = false;
    ++step_.averages;
  }
  SetRound();
  return outcome;
}

// The signatures of the next average say which it is of its step, on which the ranks agree; a module
// counts from its last forward().
void GradientReducer::Impl::SetRound() {
  if (!rule_->at_backward) return;
  // A module may never see a forward(): its program may call another function.
  constexpr std::uint32_t kMostOfModule = 16;
  const std::uint32_t number =
      1 + (rule_->of_module ? step_.averages % kMostOfModule : step_.averages);
  members_.round() = untold_ == Untold::kUnheard ? kRoundAfterThrow : number;
}

void GradientReducer::Impl::SynchronizeUnlessDone(bool in_step) {
  if (rule_->of_steps()) return;
  AwaitEnds();
  // The others may not have touched in no_sync() what this rank has.
  const bool is_averaged = step_.synchronized && !held_ && !members_.AnyTouched(step_.late);
  if (is_averaged && step_.late.empty()) return;
  CheckSession();
  EndFailed();
  members_.CheckStreams();
  // Clipping sees no gradient that is kept as a shard.
  const bool may_be_clipped = in_step && is_averaged && !rule_->keeps_shards;
  const bool again = may_be_clipped && rule_->may_repeat();
  BeginAverage(
      /*only_late=*/is_averaged && !again,
      /*refuses_late=*/is_averaged ? may_be_clipped && !again : in_step && rule_->at_backward);
  CollectEnd(/*wait=*/true);
  if (const Outcome outcome = EndAverage(); outcome.error) std::rethrow_exception(outcome.error);
}

// Before the first gradient of a backward, for a module that knows: its end is this one's, and none
// of those within it averages.
void GradientReducer::Impl::BeginBackward() {
  set_.session->backward_ends().Join(shared_from_this(), /*on_cpu=*/false, /*whole=*/true);
}

void GradientReducer::Impl::BeginEnd() {
  EndFailed();  // of a backward() within this one
  ThrowFailure();
  const bool reported = members_.FirstReported() != nullptr;
  // A module averages nothing that is in no_sync, or that is of other tensors.
  if (rule_->of_module && !reported) return;
  if (!reported && ++passes_ < rule_->passes) return;
  if (!std::exchange(step_.timed, true) && !(rule_->of_module && rule_->alone)) steps().BeginStep();
  BeginAverage();
  Attempt([this] { members_.CheckStreams(); });
}

void GradientReducer::Impl::ConcludeEnd() {
  if (!under_way_) return;
  if (const Outcome outcome = EndAverage(); outcome.error) {
    if (outcome.threw_elsewhere) Fail(outcome.error);
    std::rethrow_exception(outcome.error);
  }
  if (!rule_->of_module || rule_->alone) return;
  step_.synchronized = false;
  step_.timed = false;
  step_ends_ = true;
  steps().EndStep();
}

// This may run on autograd's thread of a GPU, while the program's thread goes on. If all gradients
// were submitted before the backward() threw, its average is like any other, and a backward() around
// it that throws as well is one more, submitted later. With several passes the other ranks run one
// average for all of them.
void GradientReducer::Impl::FailEnd(bool outermost) noexcept {
  try {
    const std::lock_guard<std::mutex> lock(failed_mutex_);
    if (set_.session->gone()) return;
    const bool is_untold = Forget(Untold::kGoesOnAround);
    if (failed_ends_ > 0 && rule_->passes > 1) {
      if (is_untold) NoteUntold(outermost);
      return;
    }
    if (++failed_ends_ == 1) {
      BeginAverage();
      if (!under_way_->refused_some) return NoteUntold(outermost);
    }
    ThrowInvalid("a backward() within this one has thrown: the gradients of the " +
                 members_.what() + " are averaged again after zero_grad()");
  } catch (const Error&) {
    Fail(std::current_exception());
  } catch (...) {
    core::Log(core::LogLevel::kWarning,
              "a backward() has thrown, and the other ranks could not be told: " + TextOfCurrent());
  }
}

void GradientReducer::Impl::LeaveUnheard() noexcept {
  const std::lock_guard<std::mutex> lock(failed_mutex_);
  if (untold_ == Untold::kGoesOnAround) NoteUntold(/*outermost=*/true);
}

// One that has thrown may not have ended everywhere yet.
void GradientReducer::Impl::AwaitEnds() const {
  if (!within_backward() || torch::autograd::get_current_graph_task_id() != -1) return;
  const core::TimePoint deadline = core::Clock::now() + std::chrono::seconds(30);
  core::CoolingSleep sleep(std::chrono::milliseconds(1));
  while (within_backward()) {
    if (core::Clock::now() > deadline) {
      ThrowInvalid("a backward() of the " + members_.what() +
                   " runs on another thread, and has not ended for 30 s");
    }
    sleep.Pause();
  }
}

// The averages that backward() have left which threw are collected; the other ranks wait for them as
// well.
void GradientReducer::Impl::EndFailed() {
  if (failed_ends_ == 0) return;
  const std::lock_guard<std::mutex> lock(failed_mutex_);
  for (; failed_ends_ > 0; --failed_ends_) {
    if (!under_way_) BeginAverage();
    CollectEnd(/*wait=*/true);
    const Outcome outcome = EndAverage();
    // The program has had an error of this. But where others have refused a gradient, what is around
    // averages nothing more, here as there.
    if (!outcome.threw_elsewhere) continue;
    if (untold_ == Untold::kGoesOnAround) {
      set_.session->backward_ends().FailAround(shared_from_this(), outcome.error);
    }
    failed_ends_ = 1;
  }
  Forget(Untold::kGoesOnAround);
}

}  // namespace sirtaki::detail
