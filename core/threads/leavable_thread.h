// LeavableThread is a thread that may be stuck in a medium, a driver or a file system: its owner then
// leaves it behind, with everything that it refers to, and nothing outside is called any more. The
// lanes of ops and the writers of files in core/trace have one each.
#pragma once

#include <functional>
#include <thread>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"

namespace sirtaki::core {

class LeavableThread {
 public:
  // Starts the thread. `body` holds what the thread uses, whatever becomes of the owner. `quiet`: as
  // StartQuietThread, whose exceptions these are.
  void StartThread(std::function<void()> body, bool quiet = false);
  // Asks the thread to end and waits for it: without limit while it waits or calls out, for `grace`
  // while it is at work. False: the thread was left behind, and what it uses has to stay for ever.
  bool EndThread(Duration grace) SIRTAKI_EXCLUDES(mutex);

  // ---- by the thread ----
  // WaitUntil returns false at the deadline, and may return early. It counts as waiting until the
  // thread is asked to end.
  bool WaitUntil(TimePoint deadline) SIRTAKI_REQUIRES(mutex);
  // Calls, unless the owner has left the thread behind: then nothing outside may be called, and it
  // returns false.
  bool CallOut(const std::function<void()>& call) SIRTAKI_EXCLUDES(mutex);
  // True when EndThread was called.
  bool quits() const SIRTAKI_REQUIRES(mutex) { return quits_; }

  mutable Mutex mutex;  // the owner's, too
  CondVar changed;

 private:
  // A thread is calm while it cannot be stuck.
  void SetCalm(bool calm) SIRTAKI_REQUIRES(mutex);

  bool quits_ SIRTAKI_GUARDED_BY(mutex) = false;
  bool left_ SIRTAKI_GUARDED_BY(mutex) = false;
  bool calm_ SIRTAKI_GUARDED_BY(mutex) = false;
  bool gone_ SIRTAKI_GUARDED_BY(mutex) = false;
  std::thread thread_;  // of StartThread and EndThread
};

}  // namespace sirtaki::core
