// float16 and bfloat16 by their definition, in double: slow, and nothing like the code it judges.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace sirtaki::tests {

struct SmallFloat {
  int mantissa_bits;
  int least_exponent;     // of normal numbers
  int greatest_exponent;  // of finite ones

  double Decode(std::uint16_t bits) const {
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    if (exponent == greatest_exponent - least_exponent + 2) {
      return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                           : sign * std::numeric_limits<double>::infinity();
    }
    if (exponent == 0) return sign * std::ldexp(mantissa, least_exponent - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits),
                             exponent - 1 + least_exponent - mantissa_bits);
  }

  // To nearest, ties to even. Not for NaN.
  std::uint16_t Encode(double value) const {
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const int infinity = (greatest_exponent - least_exponent + 2) << mantissa_bits;
    const double magnitude = std::fabs(value);
    if (magnitude == 0) return static_cast<std::uint16_t>(sign);
    if (std::isinf(magnitude)) return static_cast<std::uint16_t>(sign | infinity);
    const int exponent = std::max(std::ilogb(magnitude), least_exponent);
    if (exponent > greatest_exponent) return static_cast<std::uint16_t>(sign | infinity);
    // nearbyint rounds ties to even; a carry into the next exponent comes out right by the
    // addition.
    const int steps =
        static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
    const int bits = ((exponent - least_exponent) << mantissa_bits) + steps;
    return static_cast<std::uint16_t>(sign | std::min(bits, infinity));
  }
};

inline constexpr SmallFloat kFloat16{10, -14, 15};
inline constexpr SmallFloat kBFloat16{7, -126, 127};

}  // namespace sirtaki::tests
