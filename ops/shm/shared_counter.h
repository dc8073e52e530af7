// A number in shared memory that one writes and others wait for: the progress of a peer, or a
// doorbell. Lies zeroed in memory that no constructor has seen.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/base/types.h"

namespace sirtaki::ops::shm {

// Thread- and process-safe. A cache line of its own.
class alignas(64) SharedCounter {
 public:
  // Loads are in one order with the stores of all processes: who stores its own counter and then
  // finds that of a peer unchanged knows that the peer will see the store (SharedChannel::Release
  // and Behind). An acquire load may pass an earlier store where the processor has weak ones (ldapr
  // of Armv8.3).
  std::uint32_t Load() const { return value_.load(std::memory_order_seq_cst); }
  // Stores a value, and wakes whoever sleeps for it. Who sees the value sees what was written before.
  void Store(std::uint32_t value) {
    value_.store(value, std::memory_order_seq_cst);
    WakeSleepers();
  }
  void Add(std::uint32_t amount) {
    value_.fetch_add(amount, std::memory_order_seq_cst);
    WakeSleepers();
  }
  // Sleeps while the value is `seen`, but not past `deadline`; may return early.
  void Sleep(std::uint32_t seen, core::TimePoint deadline);
  bool HasSleepers() const { return sleepers_.load(std::memory_order_seq_cst) > 0; }

 private:
  void WakeSleepers() {
    if (HasSleepers()) Wake();
  }
  void Wake();

  std::atomic<std::uint32_t> value_;
  std::atomic<std::uint32_t> sleepers_;
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// Whether `value` has come as far as `target`, of counters that may wrap around.
inline bool Reached(std::uint32_t value, std::uint32_t target) {
  return static_cast<std::int32_t>(value - target) >= 0;
}

}  // namespace sirtaki::ops::shm
