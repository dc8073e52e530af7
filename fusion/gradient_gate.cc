#include "fusion/gradient_gate.h"

namespace sirtaki::fusion {

void GradientGate::Touch() {
  if (touched_.load(std::memory_order_acquire)) return;
  ++counts_.touched;
  if (touched_.exchange(true, std::memory_order_acq_rel)) --counts_.touched;
}

GradientGate::Arrival GradientGate::Arrive() {
  Touch();
  if (held()) {
    return reported() ? Arrival::kInFlight : Arrival::kEarly;
  }
  const std::uint32_t before = state_.fetch_add(1, std::memory_order_acq_rel);
  if ((before & kReported) != 0) return Arrival::kInFlight;
  if (before + 1 < needed_) return Arrival::kEarly;
  return Report() ? Arrival::kReport : Arrival::kInFlight;
}

bool GradientGate::Report() {
  ++counts_.reported;
  if ((state_.fetch_or(kReported, std::memory_order_acq_rel) & kReported) == 0) return true;
  --counts_.reported;
  return false;
}

void GradientGate::Reset() {
  if (touched_.exchange(false, std::memory_order_acq_rel)) --counts_.touched;
  if ((state_.exchange(0, std::memory_order_acq_rel) & kReported) != 0) --counts_.reported;
}

}  // namespace sirtaki::fusion
