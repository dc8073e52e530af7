#include "launch/job/course.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>

namespace sirtaki::launch {

using core::Duration;
using core::TimePoint;
using std::chrono::seconds;

namespace {

// After this time another signal counts as asking twice. Some send one to this process and to its
// group, which is one asking.
// The time after the launcher's end for what the ranks have still to say.
constexpr Duration kLastWords = seconds(2);
// The time is longer where it matters which hosts are gone: until a silent one is noticed.
constexpr Duration kSilence = seconds(14);

constexpr Duration kUnlimited = Duration::max();

struct Step {
  Due due;
  Phase next;
  Duration time;  // that the next phase has
};

// A phase ends with this step.
constexpr std::array<Step, 6> kSteps = {{
    /* kStarting */ {Due::kLateStart, Phase::kFailing, Duration(0)},
    /* kRunning */ {Due::kLateInit, Phase::kFailing, Duration(0)},
    /* kFailing */ {Due::kStop, Phase::kStopping, seconds(4)},
    /* kStopping */ {Due::kTerminate, Phase::kTerminating, seconds(3)},
    /* kTerminating */ {Due::kKill, Phase::kKilled, kUnlimited},
    /* kKilled */ {Due::kNothing, Phase::kKilled, kUnlimited},
}};

}  // namespace

bool Course::Arrive() {
  if (++arrived_ < ranks_ || phase_ != Phase::kStarting) return false;
  phase_ = Phase::kRunning;
  begun_ = true;
  until_ = kNever;
  return true;
}

void Course::NoteInit(bool all_in, bool all_through, TimePoint now) {
  if (phase_ != Phase::kRunning) return;
  if (all_through) {
    until_ = kNever;
  } else if (all_in && until_ == kNever) {
    until_ = now + start_timeout_;
  }
}

void Course::Fail(TimePoint now, Duration grace) {
  if (phase_ > Phase::kFailing) return;
  until_ = phase_ == Phase::kFailing ? std::min(until_, now + grace) : now + grace;
  phase_ = Phase::kFailing;
}

bool Course::TakeSignal(TimePoint now) {
  const bool again = signalled_at_ && now >= *signalled_at_ + kAskedOnce;
  if (!signalled_at_) signalled_at_ = now;
  Fail(now, Duration(0));
  // A user who asks twice does not want to wait, nor one who asks when all but the output is over.
  if (!again && phase_ != Phase::kKilled) return false;
  phase_ = Phase::kKilled;
  until_ = kNever;
  return true;
}

void Course::NoteLauncherEnd(bool for_hosts, TimePoint now) {
  leave_at_ = now + (for_hosts ? kSilence : kLastWords);
}

Due Course::TakeDue(TimePoint now) {
  if (now >= leave_at_) leave_at_ = kNever;
  if (now < until_) return Due::kNothing;
  const Step& step = kSteps[static_cast<std::size_t>(phase_)];
  phase_ = step.next;
  until_ = step.time == kUnlimited ? kNever : now + step.time;
  // Nobody is there who could end a program.
  if (phase_ == Phase::kStopping && arrived_ == 0) until_ = now;
  return step.due;
}

TimePoint Course::NextTime() const { return std::min(until_, leave_at_); }

}  // namespace sirtaki::launch
