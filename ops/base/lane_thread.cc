#include "ops/base/lane_thread.h"

#include <utility>

namespace sirtaki::ops {

void LaneThread::StartThread(std::function<void()> body) {
  thread_ = std::thread([this, body = std::move(body)] {
    body();
    // The body holds this object, too.
    core::MutexLock lock(mutex);
    gone_ = true;
    changed.NotifyAll();
  });
}

bool LaneThread::EndThread(core::Duration grace) {
  bool gone = false;
  {
    core::MutexLock lock(mutex);
    quits_ = true;
    changed.NotifyAll();
    core::TimePoint limit = core::Clock::now() + grace;
    while (!gone_ && (calm_ || core::Clock::now() < limit)) {
      if (calm_) {
        changed.Wait(mutex);
        limit = core::Clock::now() + grace;
      } else {
        changed.WaitUntil(mutex, limit);
      }
    }
    gone = gone_;
    left_ = !gone_;
  }
  if (gone) {
    thread_.join();
  } else {
    thread_.detach();
  }
  return gone;
}

void LaneThread::SetCalm(bool calm) {
  calm_ = calm;
  if (quits_) changed.NotifyAll();  // EndThread waits otherwise from now on
}

bool LaneThread::WaitUntil(core::TimePoint deadline) {
  SetCalm(!quits_);
  const bool in_time = changed.WaitUntil(mutex, deadline);
  SetCalm(false);
  return in_time;
}

bool LaneThread::CallOut(const std::function<void()>& call) {
  {
    core::MutexLock lock(mutex);
    if (left_) return false;
    SetCalm(true);
  }
  call();
  core::MutexLock lock(mutex);
  SetCalm(false);
  return true;
}

}  // namespace sirtaki::ops
