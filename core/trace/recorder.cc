#include "core/trace/recorder.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace sirtaki::core::trace {

Recorder::Recorder(std::size_t capacity)
    : mask_(std::bit_ceil(std::max(capacity, kFewestEvents)) - 1),
      slots_(std::make_unique<Slot[]>(mask_ + 1)) {}  // NOLINT(modernize-avoid-c-arrays)

void Recorder::Add(const Event& event) noexcept {
  const std::uint64_t number = next_.fetch_add(1, std::memory_order_acq_rel);
  Slot& slot = slots_[number & mask_];
  // Whoever has the place now is a whole ring behind, and keeps it; or ahead, and this is too late.
  std::uint64_t state = slot.state.load(std::memory_order_relaxed);
  if (state % 2 == 1 || state > 2 * number ||
      !slot.state.compare_exchange_strong(state, 2 * number + 1, std::memory_order_acquire,
                                          std::memory_order_relaxed)) {
    return;
  }
  const auto* from = reinterpret_cast<const std::byte*>(&event);
  std::uint64_t word = 0;
  // The bytes behind the text stay as they were.
  const std::size_t used = (offsetof(Event, letters) + event.text_bytes + 7) / sizeof(word);
  // Release, each: a reader that sees one of these words sees that the place is being written.
  for (std::size_t i = 0; i < used; ++i, from += sizeof(word)) {
    std::memcpy(&word, from, sizeof(word));
    slot.words[i].store(word, std::memory_order_release);
  }
  slot.state.store(2 * number + 2, std::memory_order_release);
}

std::uint64_t Recorder::Read(std::uint64_t from, bool to_the_end, std::vector<Event>* events,
                             std::uint64_t* lost) const {
  const std::uint64_t end = added();
  const std::uint64_t oldest = end > capacity() ? end - capacity() : 0;
  if (from < oldest) {
    *lost += oldest - from;
    from = oldest;
  }
  for (; from < end; ++from) {
    const Slot& slot = slots_[from & mask_];
    const std::uint64_t there = 2 * from + 2;
    const std::uint64_t before = slot.state.load(std::memory_order_acquire);
    std::array<std::uint64_t, kWords> words;  // NOLINT: filled at once
    if (before == there) {
      for (std::size_t i = 0; i < kWords; ++i) {
        words[i] = slot.words[i].load(std::memory_order_acquire);
      }
      if (slot.state.load(std::memory_order_relaxed) == there) {
        std::memcpy(static_cast<void*>(&events->emplace_back()), words.data(), sizeof(Event));
        continue;
      }
    } else if (before < there && !to_the_end && from + capacity() > added()) {
      break;  // it is on its way
    }
    ++*lost;
  }
  return from;
}

}  // namespace sirtaki::core::trace
