#include "ops/shm/shared_counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <ctime>

namespace sirtaki::ops::shm {

void SharedCounter::Sleep(std::uint32_t seen, core::TimePoint deadline) {
  const core::Duration left = deadline - core::Clock::now();
  if (left <= core::Duration::zero()) return;
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  timespec time{};
  time.tv_sec = static_cast<time_t>(ns / 1'000'000'000);
  time.tv_nsec = static_cast<long>(ns % 1'000'000'000);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  // The kernel compares again, so a store in between is not missed. Not FUTEX_PRIVATE: the waker
  // may be another process.
  if (value_.load(std::memory_order_seq_cst) == seen) {
    syscall(SYS_futex, &value_, FUTEX_WAIT, seen, &time, nullptr, 0);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void SharedCounter::Wake() {
  syscall(SYS_futex, &value_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace sirtaki::ops::shm
