#include "fusion/convert.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/check.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define SIRTAKI_HAVE_F16C_PATH 1
#endif

// Tells the compiler what Convert's contract says: no iteration reads what another one writes.
#if defined(__clang__)
#define SIRTAKI_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define SIRTAKI_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace sirtaki::fusion {
namespace {

// float32 passes through the cache's first level between a conversion and its scaling.
constexpr std::int64_t kBlock = 2048;

float WidenFloat16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);
  // Exponent 31 becomes 255; a signalling NaN becomes quiet, as the processor's own conversion
  // does.
  const std::uint32_t special = (normal + (112u << 23)) | (magnitude > 0x7c00u ? 0x400000u : 0u);
  // Below 2^-14 a half is a whole number of 2^-24, and that product is exact. Nothing subnormal in
  // float32 is involved, so flush-to-zero modes do no harm.
  const auto subnormal = std::bit_cast<std::uint32_t>(
      static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  const std::uint32_t finite = magnitude < 0x400u ? subnormal : normal;
  const std::uint32_t bits = magnitude >= 0x7c00u ? special : finite;
  return std::bit_cast<float>(sign | bits);
}

std::uint16_t RoundToFloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  // Normal: half of the last place less one, plus one if the last kept bit is odd: ties go to even.
  // A carry runs into the exponent, which is right, up to infinity.
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the last place is 2^-24, which is that of a float32 in [0.5, 1): adding 0.5 rounds
  // there.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const std::uint32_t huge = magnitude > 0x7f800000u ? nan : 0x7c00u;
  const std::uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return static_cast<std::uint16_t>(sign | (magnitude >= 0x47800000u ? huge : finite));
}

std::uint16_t RoundToBFloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

#ifdef SIRTAKI_HAVE_F16C_PATH
bool HasF16c() {
  static const bool has = [] {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    constexpr unsigned kF16cBit = 1u << 29;
    // "avx" also asks whether the system saves the wide registers.
    return __builtin_cpu_supports("avx") != 0 && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 &&
           (ecx & kF16cBit) != 0;
  }();
  return has;
}

// Both return how many elements they converted: all whole groups of eight.
__attribute__((target("avx,f16c"))) std::int64_t F16cWiden(const std::uint16_t* in, float* out,
                                                           std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
  }
  return i;
}

__attribute__((target("avx,f16c"))) std::int64_t F16cRound(const float* in, std::uint16_t* out,
                                                           std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
  return i;
}
#endif

template <typename T>
void ScaleFloating(const T* in, T* out, std::int64_t count, Scale scale) {
  const bool power_of_two = std::has_single_bit(static_cast<std::uint64_t>(scale.divisor));
  if (scale.factor == 1.0 && !power_of_two) {
    const T divisor = static_cast<T>(scale.divisor);
    SIRTAKI_INDEPENDENT
    for (std::int64_t i = 0; i < count; ++i) out[i] = in[i] / divisor;
    return;
  }
  const T factor = static_cast<T>(scale.factor / static_cast<double>(scale.divisor));
  SIRTAKI_INDEPENDENT
  for (std::int64_t i = 0; i < count; ++i) out[i] = in[i] * factor;
}

template <typename From, typename To>
void DivideIntegers(const From* in, To* out, std::int64_t count, Scale scale) {
  SIRTAKI_CHECK(scale.factor == 1.0, "integers take no factor");
  // In 64 bits: the divisor may exceed the type's own range.
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<To>(static_cast<std::int64_t>(in[i]) / scale.divisor);
  }
}

template <typename T, typename Function>
void Apply(Function function, const void* in, void* out, std::int64_t count, Scale scale) {
  function(static_cast<const T*>(in), static_cast<T*>(out), count, scale);
}

template <typename Narrow, typename Wide>
void ConvertIntegers(bool widens, const void* in, void* out, std::int64_t count, Scale scale) {
  if (widens) {
    DivideIntegers(static_cast<const Narrow*>(in), static_cast<Wide*>(out), count, scale);
  } else {
    DivideIntegers(static_cast<const Wide*>(in), static_cast<Narrow*>(out), count, scale);
  }
}

void ScaleSameType(core::DType dtype, const void* in, void* out, std::int64_t count, Scale scale) {
  switch (dtype) {
    case core::DType::kU8:
      return Apply<std::uint8_t>(DivideIntegers<std::uint8_t, std::uint8_t>, in, out, count, scale);
    case core::DType::kI8:
      return Apply<std::int8_t>(DivideIntegers<std::int8_t, std::int8_t>, in, out, count, scale);
    case core::DType::kI16:
      return Apply<std::int16_t>(DivideIntegers<std::int16_t, std::int16_t>, in, out, count, scale);
    case core::DType::kI32:
      return Apply<std::int32_t>(DivideIntegers<std::int32_t, std::int32_t>, in, out, count, scale);
    case core::DType::kI64:
      return Apply<std::int64_t>(DivideIntegers<std::int64_t, std::int64_t>, in, out, count, scale);
    case core::DType::kF32:
      return Apply<float>(ScaleFloating<float>, in, out, count, scale);
    case core::DType::kF64:
      return Apply<double>(ScaleFloating<double>, in, out, count, scale);
    default:
      break;
  }
  core::CheckFailed(__FILE__, __LINE__, "dtype", "this type is only moved, never scaled");
}

using WidenFunction = void (*)(const std::uint16_t*, float*, std::int64_t);
using RoundFunction = void (*)(const float*, std::uint16_t*, std::int64_t);

void WidenScaled(WidenFunction widen, const std::uint16_t* in, float* out, std::int64_t count,
                 Scale scale) {
  if (scale.identity()) return widen(in, out, count);
  for (std::int64_t i = 0; i < count; i += kBlock) {
    const std::int64_t n = std::min(kBlock, count - i);
    widen(in + i, out + i, n);
    ScaleFloating(out + i, out + i, n, scale);
  }
}

void RoundScaled(RoundFunction round, const float* in, std::uint16_t* out, std::int64_t count,
                 Scale scale) {
  if (scale.identity()) return round(in, out, count);
  float block[kBlock];
  for (std::int64_t i = 0; i < count; i += kBlock) {
    const std::int64_t n = std::min(kBlock, count - i);
    ScaleFloating(in + i, block, n, scale);
    round(block, out + i, n);
  }
}

WidenFunction WidenOf(core::DType half) {
  return half == core::DType::kF16 ? Float16ToFloat : BFloat16ToFloat;
}

RoundFunction RoundOf(core::DType half) {
  return half == core::DType::kF16 ? FloatToFloat16 : FloatToBFloat16;
}

// Scaled in float64, before it is narrowed.
void NarrowScaled(const double* in, float* out, std::int64_t count, Scale scale) {
  double block[kBlock];
  for (std::int64_t i = 0; i < count; i += kBlock) {
    const std::int64_t n = std::min(kBlock, count - i);
    const double* scaled = in + i;
    if (!scale.identity()) {
      ScaleFloating(in + i, block, n, scale);
      scaled = block;
    }
    float* const to = out + i;
    for (std::int64_t j = 0; j < n; ++j) to[j] = static_cast<float>(scaled[j]);
  }
}

void WidenToDouble(const float* in, double* out, std::int64_t count, Scale scale) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<double>(in[i]);
  if (!scale.identity()) ScaleFloating(out, out, count, scale);
}

void ConvertFromDouble(const double* in, core::DType to, void* out, std::int64_t count,
                       Scale scale) {
  if (to == core::DType::kF32) return NarrowScaled(in, static_cast<float*>(out), count, scale);
  float block[kBlock];
  for (std::int64_t i = 0; i < count; i += kBlock) {
    const std::int64_t n = std::min(kBlock, count - i);
    NarrowScaled(in + i, block, n, scale);
    RoundOf(to)(block, static_cast<std::uint16_t*>(out) + i, n);
  }
}

void ConvertToDouble(core::DType from, const void* in, double* out, std::int64_t count,
                     Scale scale) {
  float block[kBlock];
  for (std::int64_t i = 0; i < count; i += kBlock) {
    const std::int64_t n = std::min(kBlock, count - i);
    const float* wide = static_cast<const float*>(in) + i;
    if (from != core::DType::kF32) {
      WidenOf(from)(static_cast<const std::uint16_t*>(in) + i, block, n);
      wide = block;
    }
    WidenToDouble(wide, out + i, n, scale);
  }
}

// Precondition: different types, and not the two half types.
void ConvertFloating(core::DType from, const void* in, core::DType to, void* out,
                     std::int64_t count, Scale scale) {
  if (from == core::DType::kF64) {
    ConvertFromDouble(static_cast<const double*>(in), to, out, count, scale);
  } else if (to == core::DType::kF64) {
    ConvertToDouble(from, in, static_cast<double*>(out), count, scale);
  } else if (to == core::DType::kF32) {
    WidenScaled(WidenOf(from), static_cast<const std::uint16_t*>(in), static_cast<float*>(out),
                count, scale);
  } else {
    RoundScaled(RoundOf(to), static_cast<const float*>(in), static_cast<std::uint16_t*>(out), count,
                scale);
  }
}

}  // namespace

namespace internal {

void PortableFloat16ToFloat(const std::uint16_t* in, float* out, std::int64_t count) {
  SIRTAKI_INDEPENDENT
  for (std::int64_t i = 0; i < count; ++i) out[i] = WidenFloat16(in[i]);
}

void PortableFloatToFloat16(const float* in, std::uint16_t* out, std::int64_t count) {
  SIRTAKI_INDEPENDENT
  for (std::int64_t i = 0; i < count; ++i) out[i] = RoundToFloat16(in[i]);
}

}  // namespace internal

void Float16ToFloat(const std::uint16_t* in, float* out, std::int64_t count) {
  std::int64_t done = 0;
#ifdef SIRTAKI_HAVE_F16C_PATH
  if (HasF16c()) done = F16cWiden(in, out, count);
#endif
  internal::PortableFloat16ToFloat(in + done, out + done, count - done);
}

void FloatToFloat16(const float* in, std::uint16_t* out, std::int64_t count) {
  std::int64_t done = 0;
#ifdef SIRTAKI_HAVE_F16C_PATH
  if (HasF16c()) done = F16cRound(in, out, count);
#endif
  internal::PortableFloatToFloat16(in + done, out + done, count - done);
}

void BFloat16ToFloat(const std::uint16_t* in, float* out, std::int64_t count) {
  SIRTAKI_INDEPENDENT
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = std::bit_cast<float>(static_cast<std::uint32_t>(in[i]) << 16);
  }
}

void FloatToBFloat16(const float* in, std::uint16_t* out, std::int64_t count) {
  SIRTAKI_INDEPENDENT
  for (std::int64_t i = 0; i < count; ++i) out[i] = RoundToBFloat16(in[i]);
}

void RoundThrough(core::DType half, float* values, std::int64_t count, Scale scale) {
  std::uint16_t block[kBlock];
  for (std::int64_t i = 0; i < count; i += kBlock) {
    const std::int64_t n = std::min(kBlock, count - i);
    Convert(core::DType::kF32, values + i, half, block, n, scale);
    Convert(half, block, core::DType::kF32, values + i, n);
  }
}

core::DType AccumulationType(core::DType dtype, core::ReduceOp reduction) {
  const bool average = reduction == core::ReduceOp::kAverage;
  switch (dtype) {
    case core::DType::kF16:
    case core::DType::kBF16:
      return core::DType::kF32;
    case core::DType::kU8:
    case core::DType::kI8:
    case core::DType::kI16:
      return average ? core::DType::kI32 : dtype;
    case core::DType::kI32:
      return average ? core::DType::kI64 : dtype;
    default:
      return dtype;
  }
}

void Convert(core::DType from, const void* in, core::DType to, void* out, std::int64_t count,
             Scale scale) {
  if (count <= 0) return;
  if (from == to) {
    if (!scale.identity()) return ScaleSameType(from, in, out, count, scale);
    if (in != out) std::memcpy(out, in, static_cast<std::size_t>(count) * core::SizeOf(from));
    return;
  }
  const bool widens = core::SizeOf(from) < core::SizeOf(to);
  const core::DType narrow = widens ? from : to;
  const core::DType wide = widens ? to : from;
  if (core::IsFloating(from) && core::IsFloating(to) && !(core::IsHalf(from) && core::IsHalf(to))) {
    return ConvertFloating(from, in, to, out, count, scale);
  }
  SIRTAKI_CHECK(
      AccumulationType(narrow, core::ReduceOp::kAverage) == wide,
      "only floating types, and a type and what its reductions are kept in, are converted");
  switch (narrow) {
    case core::DType::kU8:
      return ConvertIntegers<std::uint8_t, std::int32_t>(widens, in, out, count, scale);
    case core::DType::kI8:
      return ConvertIntegers<std::int8_t, std::int32_t>(widens, in, out, count, scale);
    case core::DType::kI16:
      return ConvertIntegers<std::int16_t, std::int32_t>(widens, in, out, count, scale);
    default:
      return ConvertIntegers<std::int32_t, std::int64_t>(widens, in, out, count, scale);
  }
}

}  // namespace sirtaki::fusion
