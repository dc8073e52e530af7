#include "fusion/gradient_slots.h"

#include <cassert>

namespace sirtaki::fusion {

GradientSlots::GradientSlots(std::size_t count)
    : size_(count), reported_(new std::atomic<bool>[count]), outstanding_(count) {
  for (std::size_t i = 0; i < size_; ++i) reported_[i].store(false, std::memory_order_relaxed);
}

bool GradientSlots::Report(std::size_t slot) {
  assert(slot < size_);
  if (reported_[slot].exchange(true, std::memory_order_acq_rel)) return false;
  outstanding_.fetch_sub(1, std::memory_order_acq_rel);
  return true;
}

bool GradientSlots::reported(std::size_t slot) const {
  assert(slot < size_);
  return reported_[slot].load(std::memory_order_acquire);
}

std::size_t GradientSlots::outstanding() const {
  return outstanding_.load(std::memory_order_acquire);
}

std::vector<std::size_t> GradientSlots::Unreported() const {
  std::vector<std::size_t> slots;
  if (outstanding() == 0) return slots;
  for (std::size_t i = 0; i < size_; ++i) {
    if (!reported(i)) slots.push_back(i);
  }
  return slots;
}

void GradientSlots::Reset() {
  for (std::size_t i = 0; i < size_; ++i) {
    // Added before the mark goes: a Report that follows at once finds its slot counted.
    if (!reported(i)) continue;
    outstanding_.fetch_add(1, std::memory_order_acq_rel);
    reported_[i].store(false, std::memory_order_release);
  }
}

}  // namespace sirtaki::fusion
