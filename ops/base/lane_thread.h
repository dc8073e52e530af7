// LaneThread is the thread of a lane, written once for the large lane of the host, the lane of a GPU and a GPU's
// messages. The thread may be stuck in a medium or a driver: its owner then leaves it behind, with
// everything that it refers to, and nothing outside is called any more.
#pragma once

#include <functional>
#include <thread>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"

namespace sirtaki::ops {

class LaneThread {
 public:
  // Starts the thread. `body` holds what the thread uses, whatever becomes of the owner.
  void StartThread(std::function<void()> body);
  // Asks the thread to end and waits for it: without limit while it waits or calls out, for `grace`
  // while it is at work. False: the thread was left behind, and what it uses has to stay for ever.
  bool EndThread(core::Duration grace) SIRTAKI_EXCLUDES(mutex);

  // ---- by the thread ----
  // WaitUntil returns false at the deadline, and may return early. It counts as waiting until the
  // thread is asked to end.
  bool WaitUntil(core::TimePoint deadline) SIRTAKI_REQUIRES(mutex);
  // Calls, unless the owner has left the thread behind: then nothing outside may be called, and it
  // returns false.
  bool CallOut(const std::function<void()>& call) SIRTAKI_EXCLUDES(mutex);
  // True when EndThread was called.
  bool quits() const SIRTAKI_REQUIRES(mutex) { return quits_; }

  mutable core::Mutex mutex;  // the lane's
  core::CondVar changed;

 private:
  // A thread is calm while it cannot be stuck.
  void SetCalm(bool calm) SIRTAKI_REQUIRES(mutex);

  bool quits_ SIRTAKI_GUARDED_BY(mutex) = false;
  bool left_ SIRTAKI_GUARDED_BY(mutex) = false;
  bool calm_ SIRTAKI_GUARDED_BY(mutex) = false;
  bool gone_ SIRTAKI_GUARDED_BY(mutex) = false;
  std::thread thread_;  // of StartThread and EndThread
};

}  // namespace sirtaki::ops
