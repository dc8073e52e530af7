// Where the writers of one gradient meet the one who reduces it. The hooks of several autograd
// threads arrive at once; the thread in step() asks what is missing. Knows nothing of LibTorch, so
// that the thread sanitizer sees all of it.
#pragma once

#include <atomic>
#include <cstdint>

namespace sirtaki::fusion {

// How many gates of an optimizer are reported, and how many are touched, for who would otherwise look
// at all of them. A gate is counted before it changes and until it is reset: while hooks run the
// numbers may be too high for a moment, but never too low.
struct GateCounts {
  std::atomic<int> reported{0};
  std::atomic<int> touched{0};
};

// Thread-safe, never blocks.
class GradientGate {
 public:
  // `passes`: backward passes that write the gradient before it is reduced, at least 1. `counts`
  // outlive the gate.
  GradientGate(int passes, GateCounts& counts)
      : needed_(static_cast<std::uint32_t>(passes)), counts_(counts) {}
  ~GradientGate() { Reset(); }
  GradientGate(const GradientGate&) = delete;
  GradientGate& operator=(const GradientGate&) = delete;

  enum class Arrival {
    kEarly,     // more passes are to come, or the gradient is held: nothing to do
    kReport,    // it is complete, and the caller, nobody else, starts its reduction
    kInFlight,  // it was reported already: it has been written while it is being reduced
  };
  // A backward pass has written the gradient. What the passes wrote before they arrived is visible
  // to who is told kReport.
  Arrival Arrive();

  // Reports it as it is; false if it was reported already.
  bool Report();
  bool reported() const { return (state_.load(std::memory_order_acquire) & kReported) != 0; }
  // True if a pass has arrived since the last Reset.
  bool touched() const { return touched_.load(std::memory_order_acquire); }

  // While held, passes arrive without being counted. Nests.
  void Hold() { holds_.fetch_add(1, std::memory_order_acq_rel); }
  void Release() { holds_.fetch_sub(1, std::memory_order_acq_rel); }
  bool held() const { return holds_.load(std::memory_order_acquire) != 0; }

  // Reset makes it as before the first pass. An arrival at the same time counts before or after.
  void Reset();

 private:
  static constexpr std::uint32_t kReported = 1U << 31;

  void Touch();

  const std::uint32_t needed_;
  GateCounts& counts_;
  // Passes counted, and whether it was reported, in one word: a pass that is not the last must not
  // take the last one's report, made meanwhile, for one that came before it.
  std::atomic<std::uint32_t> state_{0};
  std::atomic<int> holds_{0};
  std::atomic<bool> touched_{false};
};

}  // namespace sirtaki::fusion
