// Limits say how what is agreed on is divided and moved. They are the same on all ranks at one place
// of the order, and may change at another.
#pragma once

#include <cstdint>

#include "core/base/thread_annotations.h"
#include "core/config/config.h"

namespace sirtaki::core {

struct Limits {
  std::int64_t fusion_bytes = std::int64_t{64} << 20;  // of a group; a larger tensor goes alone
  std::int64_t small_bytes = std::int64_t{64} << 10;   // groups up to this go to the small lane
  std::int64_t chunk_bytes = std::int64_t{1} << 20;    // moved at a time on the large lane
  std::int64_t bucket_bytes = 0;                       // of gradients
  std::int64_t first_bucket_bytes = 0;
  std::int64_t fusion_delay_us = 50;  // new work waits this long for more: Hold

  static Limits Of(const Config& config);

  // Calls visit(name, value) for each value, in the order of a message.
  template <typename AnyLimits, typename Visit>
  static void ForEach(AnyLimits& limits, const Visit& visit) {
    visit("fusion_bytes", limits.fusion_bytes);
    visit("small_bytes", limits.small_bytes);
    visit("chunk_bytes", limits.chunk_bytes);
    visit("bucket_bytes", limits.bucket_bytes);
    visit("first_bucket_bytes", limits.first_bucket_bytes);
    visit("fusion_delay_us", limits.fusion_delay_us);
  }
  // None is negative, something is moved at a time, and the delay can be counted in nanoseconds.
  bool AreAllowed() const {
    bool allowed = chunk_bytes > 0 && fusion_delay_us <= std::int64_t{1} << 40;
    ForEach(*this, [&allowed](const char*, std::int64_t value) { allowed &= value >= 0; });
    return allowed;
  }
  bool operator==(const Limits&) const = default;
};

// The limits that are in force on this rank. Thread-safe.
class AgreedLimits {
 public:
  explicit AgreedLimits(const Limits& first) : limits_(first) {}

  // `changes`, unless null, is set to how often they have changed, which is the same on all ranks at
  // one place of the order.
  Limits Get(std::uint64_t* changes = nullptr) const SIRTAKI_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (changes != nullptr) *changes = changes_;
    return limits_;
  }
  void Change(const Limits& limits) SIRTAKI_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    limits_ = limits;
    ++changes_;
  }

 private:
  mutable Mutex mutex_;
  Limits limits_ SIRTAKI_GUARDED_BY(mutex_);
  std::uint64_t changes_ SIRTAKI_GUARDED_BY(mutex_) = 0;
};

}  // namespace sirtaki::core
