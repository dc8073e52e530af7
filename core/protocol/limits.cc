#include "core/protocol/limits.h"

#include <chrono>

namespace sirtaki::core {

Limits Limits::Of(const Config& config) {
  return {
      .fusion_bytes = config.fusion_bytes,
      .small_bytes = config.small_bytes,
      .chunk_bytes = config.chunk_bytes,
      .bucket_bytes = config.bucket_bytes,
      .first_bucket_bytes = config.first_bucket_bytes,
      .fusion_delay_us = std::chrono::ceil<std::chrono::microseconds>(config.fusion_delay).count()};
}

}  // namespace sirtaki::core
