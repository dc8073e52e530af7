// How to wait where nobody can be woken: look all the time at first, then sleep for a part of the
// time waited so far, so that a long wait costs next to nothing and a short one is hardly longer
// for it.
#pragma once

#include "core/base/types.h"

namespace sirtaki::core {

class CoolingSleep {
 public:
  // `longest`: of a sleep.
  explicit CoolingSleep(Duration longest) : longest_(longest), since_(Clock::now()) {}

  // Something moved: the wait begins again.
  void Restart() { since_ = Clock::now(); }
  void Pause();

 private:
  const Duration longest_;
  TimePoint since_;
};

}  // namespace sirtaki::core
