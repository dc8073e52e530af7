// The units of options, as they are kept: bytes and microseconds.
#pragma once

#include <cstdint>

namespace sirtaki::core {

inline constexpr std::int64_t kKibi = 1024;
inline constexpr std::int64_t kMebi = 1024 * kKibi;
inline constexpr std::int64_t kGibi = 1024 * kMebi;
inline constexpr std::int64_t kMillisecond = 1000;
inline constexpr std::int64_t kSecond = 1000 * kMillisecond;
inline constexpr std::int64_t kMinute = 60 * kSecond;

}  // namespace sirtaki::core
