// How to wait where nobody can be woken: look all the time at first, then sleep for a part of the
// time waited so far, so that a long wait costs next to nothing and a short one is hardly longer
// for it.
#pragma once

#include <chrono>
#include <thread>

#include "core/base/types.h"
#include "core/threads/cooling.h"

namespace sirtaki::core {

class CoolingSleep {
 public:
  // `longest`: of a sleep.
  explicit CoolingSleep(Duration longest)
      : cooling_({std::chrono::microseconds(20), longest, longest}, Clock::now()) {}

  // Something moved: the wait begins again.
  void Restart() { cooling_.Traffic(Clock::now()); }
  void Pause() {
    const TimePoint now = Clock::now();
    if (cooling_.Hot(now, std::chrono::microseconds(50))) return std::this_thread::yield();
    std::this_thread::sleep_for(cooling_.NextPoll(now, /*outstanding=*/true) - now);
  }

 private:
  Cooling cooling_;
};

}  // namespace sirtaki::core
