// Where threads sleep until something happens: an enqueue, an arrival, a completion. The transports
// that have no sleeping receive of their own (in-process, MPI, TCP) build ArmDoorbell, WaitUntil and
// Wake on it.
//
//   ticket = bell.Arm();          // 1. before the last look for work
//   if (nothing to do)            // 2. look
//     bell.WaitUntil(ticket, t);  // 3. returns at once if it rang since 1
//
// Thread-safe. Ringing costs one atomic add when nobody sleeps.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"

namespace sirtaki::core {

class Doorbell {
 public:
  Doorbell() = default;
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  // A ticket: every Ring from now on is seen by WaitUntil(ticket).
  std::uint64_t Arm() const { return rings_.load(std::memory_order_seq_cst); }

  // Sleeps until it rang after `ticket` was taken (true), or the deadline passed (false). Any
  // number of threads may sleep; a ring wakes all of them.
  bool WaitUntil(std::uint64_t ticket, TimePoint deadline) SIRTAKI_EXCLUDES(mutex_);

  void Ring() SIRTAKI_EXCLUDES(mutex_);

  // True if somebody sleeps, or is about to.
  bool HasSleepers() const { return sleepers_.load(std::memory_order_seq_cst) > 0; }

 private:
  std::atomic<std::uint64_t> rings_{0};
  std::atomic<int> sleepers_{0};
  Mutex mutex_;
  CondVar condition_;
};

}  // namespace sirtaki::core
