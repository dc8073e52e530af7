#include "fusion/gradient_gate.h"

namespace sirtaki::fusion {

GradientGate::Arrival GradientGate::Arrive() {
  touched_.store(true, std::memory_order_release);
  const bool counts = holds_.load(std::memory_order_acquire) == 0;
  if (!counts || passes_.fetch_add(1, std::memory_order_acq_rel) + 1 < needed_) {
    return reported() ? Arrival::kInFlight : Arrival::kEarly;
  }
  return Report() ? Arrival::kReport : Arrival::kInFlight;
}

bool GradientGate::Report() { return !reported_.exchange(true, std::memory_order_acq_rel); }

void GradientGate::Reset() {
  passes_.store(0, std::memory_order_relaxed);
  touched_.store(false, std::memory_order_relaxed);
  reported_.store(false, std::memory_order_release);
}

}  // namespace sirtaki::fusion
