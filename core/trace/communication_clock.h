// How long data was under way on this rank, how long its program stood still for communication, and
// how long both at once: what no sum of spans tells, for these overlap.
#pragma once

#include <cstdint>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"

namespace sirtaki::core::trace {

// Thread-safe. Of operations that are under way at the same time, and of threads that wait at the
// same time, each moment counts once. Times may be read on several threads, and so come a little
// out of order.
class CommunicationClock {
 public:
  struct Times {
    Duration transfer{};   // at least one operation was under way
    Duration wait{};       // at least one thread of the program waited
    Duration exposed{};    // both
    Duration agreement{};  // a thread waited, nothing was under way, and a call was not agreed on
  };

  void BeginCalls(std::int64_t calls, TimePoint now) { Change(now, {.calls = calls}); }
  // They are agreed on, or refused.
  void EndCalls(std::int64_t calls, TimePoint now) { Change(now, {.calls = -calls}); }
  void BeginTransfer(TimePoint now) { Change(now, {.transfers = 1}); }
  void EndTransfer(TimePoint now) { Change(now, {.transfers = -1}); }
  void BeginWait(TimePoint now) { Change(now, {.waits = 1}); }
  void EndWait(TimePoint now) { Change(now, {.waits = -1}); }
  // The times include what is not over yet.
  Times Read(TimePoint now) const SIRTAKI_EXCLUDES(mutex_);

 private:
  struct Counts {
    std::int64_t calls = 0;
    std::int64_t transfers = 0;
    std::int64_t waits = 0;
  };

  void Change(TimePoint now, const Counts& change) SIRTAKI_EXCLUDES(mutex_);
  Times At(TimePoint now) const SIRTAKI_REQUIRES(mutex_);

  mutable Mutex mutex_;  // no other is taken under it
  Times times_ SIRTAKI_GUARDED_BY(mutex_);
  TimePoint last_ SIRTAKI_GUARDED_BY(mutex_){};  // what times_ are of
  Counts under_way_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::core::trace
