// The last things that a rank did, always at hand: a ring that any thread adds to without a lock
// and without waiting for anybody. The flight recorder writes down what is in it when something
// goes wrong; the timeline follows it while it is written.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/trace/event.h"

namespace sirtaki::core::trace {

// Thread-safe. Events have numbers from 0 in the order in which their threads began to add them.
class Recorder {
 public:
  static constexpr std::size_t kFewestEvents = 64;

  // `capacity`: how many of the last events are kept; rounded up to a power of two.
  explicit Recorder(std::size_t capacity);
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // About 20 ns. An event is lost if the whole ring was filled while another thread was in the
  // middle of the same place.
  void Add(const Event& event) noexcept;

  // Appends the events from number `from` on, as far as they are there, and gives the number to go
  // on from. What has been overwritten meanwhile is left out and counted in `lost`. An event that a
  // thread is just adding, and what comes after it, is left for the next time, unless
  // `to_the_end`: then it is left out as well.
  std::uint64_t Read(std::uint64_t from, bool to_the_end, std::vector<Event>* events,
                     std::uint64_t* lost) const;

  std::size_t capacity() const { return mask_ + 1; }
  // How many events were added, and are being added.
  std::uint64_t added() const { return next_.load(std::memory_order_acquire); }

 private:
  static constexpr std::size_t kWords = sizeof(Event) / sizeof(std::uint64_t);

  // Words, because a reader may look at what is being overwritten: it notices that afterwards.
  struct Slot {
    // 2 n + 1 while event n is being written, 2 n + 2 when it is there; 0 at first.
    std::atomic<std::uint64_t> state{0};
    std::array<std::atomic<std::uint64_t>, kWords> words{};
  };

  const std::uint64_t mask_;
  const std::unique_ptr<Slot[]> slots_;  // NOLINT(modernize-avoid-c-arrays): atomics do not move
  alignas(64) std::atomic<std::uint64_t> next_{0};
};

}  // namespace sirtaki::core::trace
