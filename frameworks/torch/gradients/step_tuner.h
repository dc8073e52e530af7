// The option autotune: finds better limits while the first optimizer of a job trains.
//
// All ranks feed the same search with the same numbers, the mean of what they took for a step, so
// that they decide alike without asking.
#pragma once

#include <optional>
#include <string>

#include "core/base/types.h"
#include "frameworks/torch/session/session_set.h"
#include "fusion/autotuner.h"
#include "session/session.h"

namespace sirtaki::detail {

// Used by the thread that uses the optimizer.
class StepTuner {
 public:
  // `world`: all ranks, more than one.
  explicit StepTuner(const SessionSet& world);
  // Says if the search has not ended, unless the session's end has said it before.
  ~StepTuner();
  StepTuner(const StepTuner&) = delete;
  StepTuner& operator=(const StepTuner&) = delete;

  // A step is over, and nothing outstanding. Collective while it searches: one small all-reduce,
  // and at times a change of limits. Throws what a collective throws. Steps that some rank does not
  // make, because it has joined, do not count.
  void AfterStep();

 private:
  session::Session::Limits LimitsNow() const;
  void Apply();
  void Finish();
  void SayIfEarly() const;
  std::string GainText() const;

  const SessionSet world_;
  const session::Session::Limits configured_;
  std::optional<fusion::Autotuner> tuner_;  // since all ranks have been here together
  int steps_ = 0;
  std::optional<core::TimePoint> last_step_;
  bool finished_ = false;
};

}  // namespace sirtaki::detail
