// What a thread of our kernels does. For nvcc, and for the host's compiler: the tests run the same
// code without a GPU.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "ops/cuda/kernel_tables.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#define SIRTAKI_DEVICE __host__ __device__ inline
#define SIRTAKI_UNROLL _Pragma("unroll")
#else
#define SIRTAKI_DEVICE inline
#define SIRTAKI_UNROLL
#endif

namespace sirtaki::ops::cuda {

struct F16 {
  std::uint16_t bits;
};
struct BF16 {
  std::uint16_t bits;
};

SIRTAKI_DEVICE float FloatOf(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
SIRTAKI_DEVICE std::uint32_t BitsOf(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

template <typename T>
SIRTAKI_DEVICE bool IsNan(T value) {
  return value != value;  // NOLINT(misc-redundant-expression): std::isnan is not a device's
}

// ---- numbers: what they are computed in ----

template <typename T>
struct Number {
  using Computed = T;
  SIRTAKI_DEVICE static T Read(T value) { return value; }
  SIRTAKI_DEVICE static T Write(T value) { return value; }
};

template <>
struct Number<BF16> {
  using Computed = float;
  SIRTAKI_DEVICE static float Read(BF16 value) {
    return FloatOf(static_cast<std::uint32_t>(value.bits) << 16);
  }
  // Write rounds to nearest even; a NaN stays one.
  SIRTAKI_DEVICE static BF16 Write(float value) {
    const std::uint32_t bits = BitsOf(value);
    if (IsNan(value)) return {static_cast<std::uint16_t>(bits >> 16 | 0x40)};
    return {static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  }
};

template <>
struct Number<F16> {
  using Computed = float;
#if defined(__CUDA_ARCH__)
  __device__ static float Read(F16 value) { return __half2float(__ushort_as_half(value.bits)); }
  __device__ static F16 Write(float value) { return {__half_as_ushort(__float2half_rn(value))}; }
#else
  SIRTAKI_DEVICE static float Read(F16 value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000) << 16;
    const std::uint32_t exponent = value.bits >> 10 & 0x1f;
    const std::uint32_t mantissa = value.bits & 0x3ff;
    if (exponent == 0x1f) return FloatOf(sign | 0x7f800000 | mantissa << 13);
    if (exponent != 0) return FloatOf(sign | (exponent + 112) << 23 | mantissa << 13);
    const float subnormal = static_cast<float>(mantissa) * FloatOf(0x33800000);  // 2^-24
    return FloatOf(sign | BitsOf(subnormal));
  }
  // Write rounds to nearest even; a NaN stays one.
  SIRTAKI_DEVICE static F16 Write(float value) {
    const std::uint32_t bits = BitsOf(value);
    const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
    const std::uint32_t magnitude = bits & 0x7fffffff;
    const auto with_sign = [sign](std::uint32_t rest) {
      return F16{static_cast<std::uint16_t>(sign | rest)};
    };
    if (magnitude > 0x7f800000) return with_sign(0x7e00);
    if (magnitude >= 0x477ff000) return with_sign(0x7c00);  // 65520 and above
    if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 leaves 24 bits behind the point
      const float shifted = FloatOf(magnitude) + 0.5f;
      return with_sign(BitsOf(shifted) - 0x3f000000);
    }
    const std::uint32_t odd = magnitude >> 13 & 1;
    return with_sign((magnitude - 0x38000000 + 0xfff + odd) >> 13);
  }
#endif
};

// Truncated toward zero; beyond the type's range the end that is nearer.
template <typename T>
SIRTAKI_DEVICE T TruncatedTo(double value) {
  constexpr T kMost = std::numeric_limits<T>::max();
  constexpr T kLeast = std::numeric_limits<T>::lowest();
  // The greatest number of 64 bits is no double: the one above it is.
  if (!(value < static_cast<double>(kMost / 2 + 1) * 2)) return kMost;
  return value <= static_cast<double>(kLeast) ? kLeast : static_cast<T>(value);
}

// fusion::Scale's rule; Narrow: the type at whose ends a product of integers stops.
template <typename Narrow, typename T>
SIRTAKI_DEVICE T Scaled(T value, double factor, long long divisor) {
  if constexpr (std::is_integral_v<T>) {
    if (factor != 1.0) {
      return TruncatedTo<Narrow>(static_cast<double>(value) * factor /
                                 static_cast<double>(divisor));
    }
    return divisor == 1 ? value : static_cast<T>(value / static_cast<T>(divisor));
  } else {
    if (factor != 1.0) return value * static_cast<T>(factor / static_cast<double>(divisor));
    return divisor == 1 ? value : value / static_cast<T>(divisor);
  }
}

// ---- copies ----

// The conversion goes from one type to another; the scale is computed in the wider one.
template <typename From, typename To>
SIRTAKI_DEVICE To Converted(From value, double factor, long long divisor) {
  using A = typename Number<From>::Computed;
  using B = typename Number<To>::Computed;
  if constexpr (sizeof(A) >= sizeof(B)) {
    return Number<To>::Write(static_cast<B>(Scaled<B>(Number<From>::Read(value), factor, divisor)));
  } else {
    return Number<To>::Write(Scaled<A>(static_cast<B>(Number<From>::Read(value)), factor, divisor));
  }
}

template <typename From, typename To, bool kScales>
SIRTAKI_DEVICE To Copied(From value, const CopyTable& table) {
  if constexpr (kScales) {
    return Converted<From, To>(value, table.factor, table.divisor);
  } else {
    return value;
  }
}

template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

SIRTAKI_DEVICE int SegmentOfTile(const CopyTable& table, unsigned tile) {
  int first = 0;
  int last = table.count - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (table.first_tiles[middle] <= tile) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

template <typename From, typename To, bool kScales, int kVector>
SIRTAKI_DEVICE Pack<To, kVector> CopiedPack(const Pack<From, kVector>& inputs,
                                            const CopyTable& table) {
  Pack<To, kVector> outputs;
  for (int i = 0; i < kVector; ++i) {
    outputs.values[i] = Copied<From, To, kScales>(inputs.values[i], table);
  }
  return outputs;
}

// A thread's share of a tile, unscaled unless kScales: 16 bytes at a time where the memories allow
// it.
template <typename From, typename To, bool kScales>
SIRTAKI_DEVICE void CopyTile(const CopyTable& table, unsigned tile, int thread) {
  constexpr int kVector =
      16 / static_cast<int>(sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  using Inputs = Pack<From, kVector>;
  using Outputs = Pack<To, kVector>;

  const int index = SegmentOfTile(table, tile);
  const CopySegment& segment = table.segments[index];
  const long long begin = static_cast<long long>(tile - table.first_tiles[index]) * kTile;
  const long long left = segment.count - begin;
  const long long count = left < kTile ? left : kTile;
  To* const to = static_cast<To*>(segment.to) + begin;
  if (segment.from == nullptr) {
    To identity;
    memcpy(&identity, table.identity, sizeof(identity));
    for (long long i = thread; i < count; i += kThreadsOfABlock) to[i] = identity;
    return;
  }
  const From* const from = static_cast<const From*>(segment.from) + begin;
  const auto is_aligned = [](const void* memory, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(memory) % bytes == 0;
  };
  long long done = 0;
  if (is_aligned(from, sizeof(Inputs)) && is_aligned(to, sizeof(Outputs))) {
    const long long vectors = count / kVector;
    // Four loads under way hide the memory's latency, or as many as a thread has in a tile. The
    // compiler does not begin one before the last store by itself: the memories may be the same.
    constexpr long long kOfATile = kTile / kVector / kThreadsOfABlock;
    constexpr int kLoads = kOfATile < 1 ? 1 : kOfATile < 4 ? static_cast<int>(kOfATile) : 4;
    const auto* const loads = reinterpret_cast<const Inputs*>(from);
    auto* const stores = reinterpret_cast<Outputs*>(to);
    long long v = thread;
    for (; v + (kLoads - 1) * kThreadsOfABlock < vectors; v += kLoads * kThreadsOfABlock) {
      Inputs inputs[kLoads];
      SIRTAKI_UNROLL
      for (int i = 0; i < kLoads; ++i) inputs[i] = loads[v + i * kThreadsOfABlock];
      SIRTAKI_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        stores[v + i * kThreadsOfABlock] = CopiedPack<From, To, kScales>(inputs[i], table);
      }
    }
    for (; v < vectors; v += kThreadsOfABlock) {
      stores[v] = CopiedPack<From, To, kScales>(loads[v], table);
    }
    done = vectors * kVector;
  }
  for (long long i = done + thread; i < count; i += kThreadsOfABlock) {
    to[i] = Copied<From, To, kScales>(from[i], table);
  }
}

// ---- reductions that NCCL has not, or has otherwise ----

// A NaN wins, and -0 is less than +0.
template <typename T>
SIRTAKI_DEVICE bool IsNegative(T value) {
  unsigned char bytes[sizeof(T)];
  memcpy(bytes, &value, sizeof(T));
  return (bytes[sizeof(T) - 1] & 0x80) != 0;
}
template <typename T>
SIRTAKI_DEVICE bool IsLess(T a, T b) {
  return a < b || (a == b && IsNegative(a) && !IsNegative(b));
}

struct Minimum {
  template <typename T>
  SIRTAKI_DEVICE static T Of(T a, T b) {
    if (IsNan(a)) return a;
    return IsNan(b) || IsLess(b, a) ? b : a;
  }
};
struct Maximum {
  template <typename T>
  SIRTAKI_DEVICE static T Of(T a, T b) {
    if (IsNan(a)) return a;
    return IsNan(b) || IsLess(a, b) ? b : a;
  }
};
struct BitAnd {
  template <typename T>
  SIRTAKI_DEVICE static T Of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct BitOr {
  template <typename T>
  SIRTAKI_DEVICE static T Of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct BitXor {
  template <typename T>
  SIRTAKI_DEVICE static T Of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

template <typename Op, typename T>
SIRTAKI_DEVICE void ReduceElements(const ReduceTable& table, long long thread, long long threads) {
  const T* const parts = static_cast<const T*>(table.parts);
  for (long long i = thread; i < table.count; i += threads) {
    auto value = Number<T>::Read(parts[i]);
    for (int m = 1; m < table.members; ++m) {
      value = Op::Of(value, Number<T>::Read(parts[m * table.count + i]));
    }
    static_cast<T*>(table.result)[i] = Number<T>::Write(value);
  }
}

}  // namespace sirtaki::ops::cuda

// All kernels there are, in the words of core::DTypeName. X(suffix of the name, type)
#define SIRTAKI_COPY_KERNELS(X) \
  X(copy_1, std::uint8_t)       \
  X(copy_2, std::uint16_t)      \
  X(copy_4, std::uint32_t)      \
  X(copy_8, std::uint64_t)

// X(suffix of the name, from, to)
#define SIRTAKI_CONVERT_KERNELS(X)                   \
  X(convert_float16_float16, F16, F16)               \
  X(convert_bfloat16_bfloat16, BF16, BF16)           \
  X(convert_float32_float32, float, float)           \
  X(convert_float64_float64, double, double)         \
  X(convert_float32_float16, float, F16)             \
  X(convert_float16_float32, F16, float)             \
  X(convert_float32_bfloat16, float, BF16)           \
  X(convert_bfloat16_float32, BF16, float)           \
  X(convert_float64_float16, double, F16)            \
  X(convert_float16_float64, F16, double)            \
  X(convert_float64_bfloat16, double, BF16)          \
  X(convert_bfloat16_float64, BF16, double)          \
  X(convert_uint8_uint8, std::uint8_t, std::uint8_t) \
  X(convert_int8_int8, std::int8_t, std::int8_t)     \
  X(convert_int16_int16, std::int16_t, std::int16_t) \
  X(convert_int32_int32, std::int32_t, std::int32_t) \
  X(convert_uint8_int32, std::uint8_t, std::int32_t) \
  X(convert_int32_uint8, std::int32_t, std::uint8_t) \
  X(convert_int8_int32, std::int8_t, std::int32_t)   \
  X(convert_int32_int8, std::int32_t, std::int8_t)   \
  X(convert_int16_int32, std::int16_t, std::int32_t) \
  X(convert_int32_int16, std::int32_t, std::int16_t) \
  X(convert_int32_int64, std::int32_t, std::int64_t) \
  X(convert_int64_int32, std::int64_t, std::int32_t) \
  X(convert_int64_int64, std::int64_t, std::int64_t)

// X(suffix of the name, operation, type)
#define SIRTAKI_REDUCE_KERNELS(X)     \
  X(minimum_float16, Minimum, F16)    \
  X(minimum_bfloat16, Minimum, BF16)  \
  X(minimum_float32, Minimum, float)  \
  X(minimum_float64, Minimum, double) \
  X(maximum_float16, Maximum, F16)    \
  X(maximum_bfloat16, Maximum, BF16)  \
  X(maximum_float32, Maximum, float)  \
  X(maximum_float64, Maximum, double) \
  X(bit_and_1, BitAnd, std::uint8_t)  \
  X(bit_and_2, BitAnd, std::uint16_t) \
  X(bit_and_4, BitAnd, std::uint32_t) \
  X(bit_and_8, BitAnd, std::uint64_t) \
  X(bit_or_1, BitOr, std::uint8_t)    \
  X(bit_or_2, BitOr, std::uint16_t)   \
  X(bit_or_4, BitOr, std::uint32_t)   \
  X(bit_or_8, BitOr, std::uint64_t)   \
  X(bit_xor_1, BitXor, std::uint8_t)  \
  X(bit_xor_2, BitXor, std::uint16_t) \
  X(bit_xor_4, BitXor, std::uint32_t) \
  X(bit_xor_8, BitXor, std::uint64_t)
