// What a rank does of a schedule, for the timeline, for the table at the end, and for those that ask
// why the rank is late.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "core/trace/observer.h"
#include "parallel/schedule.h"

namespace sirtaki::parallel {

// One thread uses it; Text() is for any thread. Events are recorded while the observer wants detail,
// times of passes are taken always.
class ScheduleTrace {
 public:
  struct Options {
    std::string name;       // the pipeline's
    int micro_batches = 1;  // of a batch
    double bubble = 0;      // the share of the time that the schedule lets ranks wait
    core::TimePoint (*now)() = &core::Clock::now;
  };

  ScheduleTrace(core::trace::ObserverPtr observer, Options options);

  // A batch is traced as long as this lasts. One that ends without Complete() is not counted.
  class Batch {
   public:
    // Only training counts in the table.
    Batch(ScheduleTrace& trace, bool training);
    ~Batch();
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    void Complete() { complete_ = true; }

   private:
    ScheduleTrace& trace_;
    const bool training_;
    bool complete_ = false;
    const core::trace::Doing::Scope told_;
  };

  // Precondition of these: a batch. The instruction lives until the next one begins, or the batch ends.
  void Begin(const Instruction& instruction);
  void Arrived();  // what a pass needs is there
  void End();      // of the instruction
  // The thread waits, as long as this lasts. `what` outlives it: "stage 1 on rank 1 waits for …".
  class Wait {
   public:
    Wait(ScheduleTrace& trace, const std::string& what) : trace_(trace) { trace.SetAwaited(&what); }
    ~Wait() { trace_.SetAwaited(nullptr); }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    ScheduleTrace& trace_;
  };
  // The wait takes longer than it should: told as other stalls are. `what` as above.
  void Stalled(const std::string& what, core::Duration waited);

  // `"F1.2" (the forward pass of stage 1 for micro-batch 2)`; empty between batches.
  std::string Activity() const SIRTAKI_EXCLUDES(mutex_);
  // `in the pipeline "p": stage 1 on rank 1 waits for activations of micro-batch 2 from stage 0 on rank
  // 0, for 3 s`, or the activity for so long. Empty between batches.
  std::string Text(core::TimePoint now) const SIRTAKI_EXCLUDES(mutex_);
  // The share of the time of the batches that this rank has waited; 0 before there are two.
  double WaitedShare() const;

 private:
  void SetAwaited(const std::string* what) SIRTAKI_EXCLUDES(mutex_);
  bool detail() const { return observer_->detail.load(std::memory_order_relaxed); }
  void Tell(core::trace::EventKind kind, const std::string& text, core::TimePoint begin,
            core::TimePoint end, int count = 0);

  const core::trace::ObserverPtr observer_;
  const Options options_;
  std::uint64_t batches_ = 0;  // that have begun
  bool is_first_ = true;       // no training batch is complete
  core::TimePoint batch_begin_{};
  core::TimePoint begin_{};  // of the instruction, or the end of the last one
  core::TimePoint arrived_{};
  core::Duration busy_{};
  core::Duration all_time_{};
  core::Duration all_busy_{};
  mutable core::Mutex mutex_;  // of what others ask for
  const Instruction* instruction_ SIRTAKI_GUARDED_BY(mutex_) = nullptr;
  const std::string* awaited_ SIRTAKI_GUARDED_BY(mutex_) = nullptr;
  core::TimePoint since_ SIRTAKI_GUARDED_BY(mutex_){};
};

}  // namespace sirtaki::parallel
