// Limits say how what is agreed on is divided and moved. They are the same on all ranks at one place
// of the order, and may change at another.
#pragma once

#include <cstdint>

#include "core/config/config.h"

namespace sirtaki::core {

struct Limits {
  std::int64_t fusion_bytes = std::int64_t{64} << 20;  // of a group; a larger tensor goes alone
  std::int64_t small_bytes = std::int64_t{64} << 10;   // groups up to this go to the small lane
  std::int64_t chunk_bytes = std::int64_t{1} << 20;    // moved at a time on the large lane
  std::int64_t bucket_bytes = 0;                       // of gradients
  std::int64_t first_bucket_bytes = 0;
  std::int64_t fusion_delay_us = 50;  // new work waits so long for more: Hold

  static Limits Of(const Config& config);

  // None is negative, and something is moved at a time.
  bool AreAllowed() const {
    return fusion_bytes >= 0 && small_bytes >= 0 && chunk_bytes >= 1 && bucket_bytes >= 0 &&
           first_bucket_bytes >= 0 && fusion_delay_us >= 0;
  }
  bool operator==(const Limits&) const = default;
};

}  // namespace sirtaki::core
