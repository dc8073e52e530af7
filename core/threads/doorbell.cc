#include "core/threads/doorbell.h"

namespace sirtaki::core {

bool Doorbell::WaitUntil(std::uint64_t ticket, TimePoint deadline) {
  if (Arm() != ticket) return true;
  MutexLock lock(mutex_);
  // A sleeper writes sleepers_ and then reads rings_; Ring writes rings_ and then reads sleepers_.
  // Both orders are sequentially consistent, so one of the two sees the other.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  bool rang = Arm() != ticket;
  while (!rang) {
    const bool in_time = condition_.WaitUntil(mutex_, deadline);
    rang = Arm() != ticket;
    if (!in_time) break;
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  return rang;
}

void Doorbell::Ring() {
  rings_.fetch_add(1, std::memory_order_seq_cst);
  if (!HasSleepers()) return;
  // A sleeper holds the mutex from its look at rings_ until it sleeps: taking it once means that
  // none is between the two.
  { MutexLock lock(mutex_); }
  condition_.NotifyAll();
}

}  // namespace sirtaki::core
