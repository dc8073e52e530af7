#include "core/threads/leavable_thread.h"

#include <utility>

#include "core/threads/quiet_thread.h"

namespace sirtaki::core {

void LeavableThread::StartThread(std::function<void()> body, bool quiet) {
  const auto run = [this, body = std::move(body)] {
    body();
    // The body holds this object, too.
    MutexLock lock(mutex);
    gone_ = true;
    changed.NotifyAll();
  };
  thread_ = quiet ? StartQuietThread(run) : std::thread(run);
}

bool LeavableThread::EndThread(Duration grace) {
  bool gone = false;
  {
    MutexLock lock(mutex);
    quits_ = true;
    changed.NotifyAll();
    TimePoint limit = Clock::now() + grace;
    while (!gone_ && (calm_ || Clock::now() < limit)) {
      if (calm_) {
        changed.Wait(mutex);
        limit = Clock::now() + grace;
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

void LeavableThread::SetCalm(bool calm) {
  calm_ = calm;
  if (quits_) changed.NotifyAll();  // EndThread waits otherwise from now on
}

bool LeavableThread::WaitUntil(TimePoint deadline) {
  SetCalm(!quits_);
  const bool in_time = changed.WaitUntil(mutex, deadline);
  SetCalm(false);
  return in_time;
}

bool LeavableThread::CallOut(const std::function<void()>& call) {
  {
    MutexLock lock(mutex);
    if (left_) return false;
    SetCalm(true);
  }
  call();
  MutexLock lock(mutex);
  SetCalm(false);
  return true;
}

}  // namespace sirtaki::core
