#include "fusion/gradient_gate.h"

namespace sirtaki::fusion {

GradientGate::Arrival GradientGate::Arrive() {
  touched_.store(true, std::memory_order_release);
  if (held()) {
    return reported() ? Arrival::kInFlight : Arrival::kEarly;
  }
  const std::uint32_t before = state_.fetch_add(1, std::memory_order_acq_rel);
  if ((before & kReported) != 0) return Arrival::kInFlight;
  if (before + 1 < needed_) return Arrival::kEarly;
  return Report() ? Arrival::kReport : Arrival::kInFlight;
}

bool GradientGate::Report() {
  return (state_.fetch_or(kReported, std::memory_order_acq_rel) & kReported) == 0;
}

void GradientGate::Reset() {
  touched_.store(false, std::memory_order_relaxed);
  state_.store(0, std::memory_order_release);
}

}  // namespace sirtaki::fusion
