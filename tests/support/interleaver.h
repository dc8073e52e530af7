// Runs threads one at a time, and chooses by a seed which goes on at each step: so a test explores
// how the threads of something may interleave, the same way for the same seed. Time is virtual: it
// passes a little with each look at it, and to the next deadline where all threads sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <semaphore>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"

namespace sirtaki::tests {

class Interleaver {
 public:
  explicit Interleaver(std::uint32_t seed) : random_(seed), stays_(1U << random_() % 6) {}
  Interleaver(const Interleaver&) = delete;
  Interleaver& operator=(const Interleaver&) = delete;

  void Add(std::function<void()> body);
  // Runs the threads to their ends. False: all that are left sleep for ever, or they have made
  // `most_steps`; the threads are then left behind, and this object has to stay.
  bool Run(std::uint64_t most_steps);
  // Called where all threads sleep, with the next deadline among theirs.
  std::function<void(core::TimePoint until)> all_sleep;

  // ---- by the threads ----
  void Step();  // another thread may go on
  // Sleeps until `ready`, which is asked where another thread has made a step, or the deadline.
  // False: at the deadline.
  bool SleepUntil(const std::function<bool()>& ready, core::TimePoint deadline);
  core::TimePoint Now();  // also before they run
  // Makes a choice of the test's own, in [0, bound).
  std::uint32_t Choose(std::uint32_t bound) {
    return static_cast<std::uint32_t>(random_() % bound);
  }

  // Returns the one that the calling thread belongs to.
  static Interleaver& Current() { return *current_; }

 private:
  struct Thread {
    std::function<void()> body;
    std::binary_semaphore turn{0};
    std::function<bool()> ready;  // null: it does not sleep
    core::TimePoint deadline{};
    bool over = false;
  };

  // Hands the turn on, and comes back with it; a thread that is over does not come back.
  void HandOn(Thread& self);
  Thread* Next();
  bool CanGoOn(const Thread& thread) const {
    return !thread.over && (!thread.ready || thread.ready() || thread.deadline <= now_);
  }

  static inline thread_local Interleaver* current_ = nullptr;
  static inline thread_local Thread* self_ = nullptr;

  std::mt19937 random_;
  const std::uint32_t stays_;  // a thread goes on as it is in all but one of this many steps
  core::TimePoint now_{std::chrono::seconds(1000)};
  std::uint64_t steps_left_ = 0;
  bool failed_ = false;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::binary_semaphore ended_{0};
};

// ---- what the threads of BasicDriver synchronize by, in a test ----

struct InterleavedSync {
  template <typename T>
  class Atomic {
   public:
    Atomic() = default;
    Atomic(T value) : value_(value) {}  // NOLINT(google-explicit-constructor): as std::atomic
    Atomic(const Atomic&) = delete;
    Atomic& operator=(const Atomic&) = delete;

    T load(std::memory_order = std::memory_order_seq_cst) const { return Stepped(), value_; }
    void store(T value, std::memory_order = std::memory_order_seq_cst) {
      Stepped(), value_ = value;
    }
    operator T() const { return load(); }  // NOLINT(google-explicit-constructor): as std::atomic
    T operator=(T value) { return store(value), value; }  // NOLINT: as std::atomic
    T exchange(T value) { return Stepped(), std::exchange(value_, value); }
    T fetch_add(T value) { return Stepped(), std::exchange(value_, value_ + value); }
    T fetch_sub(T value) { return Stepped(), std::exchange(value_, value_ - value); }
    bool compare_exchange_strong(T& expected, T value) {
      Stepped();
      const bool same = value_ == expected;
      (same ? value_ : expected) = same ? value : value_;
      return same;
    }

   private:
    static void Stepped() { Interleaver::Current().Step(); }
    T value_{};
  };

  class SIRTAKI_CAPABILITY("mutex") Mutex {
   public:
    void Lock() SIRTAKI_ACQUIRE() {
      Interleaver::Current().SleepUntil([this] { return !held_; }, core::TimePoint::max());
      held_ = true;
    }
    bool TryLock() SIRTAKI_TRY_ACQUIRE(true) {
      Interleaver::Current().Step();
      return !std::exchange(held_, true);
    }
    void Unlock() SIRTAKI_RELEASE() {
      held_ = false;
      Interleaver::Current().Step();
    }

   private:
    bool held_ = false;
  };

  // Parking behaves like core::Parking.
  class Parking {
   public:
    void Announce() { occupied_ = true; }
    void Rest(core::TimePoint limit) {
      Interleaver::Current().SleepUntil([this] { return called_; }, limit);
      occupied_ = false;
      called_ = false;
    }
    bool occupied() const { return occupied_; }
    void Unpark() {
      if (occupied_) called_ = true;
    }

   private:
    Atomic<bool> occupied_{false};
    bool called_ = false;
  };
};

}  // namespace sirtaki::tests
