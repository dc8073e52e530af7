#include "fusion/convert.h"

#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fusion/convert.cc"
#include <hwy/foreach_target.h>
// After it, what is compiled for each target.
#include "core/base/check.h"
#include "fusion/elements_inl.h"

HWY_BEFORE_NAMESPACE();
namespace sirtaki::fusion::HWY_NAMESPACE {

// T: what is computed with. The memories are disjoint or the same.
template <typename T, class From, class To>
void Transform(const void* in, void* out, std::size_t count, Scale scale) {
  const hn::ScalableTag<T> d;
  const std::size_t lanes = hn::Lanes(d);
  const Factor<T> factor(scale);
  const auto* from = static_cast<const typename From::Stored*>(in);
  auto* to = static_cast<typename To::Stored*>(out);
  std::size_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    const auto low = From::Load(d, from + i);
    const auto high = From::Load(d, from + i + lanes);
    To::Store(d, factor.Apply(d, low), to + i);
    To::Store(d, factor.Apply(d, high), to + i + lanes);
  }
  for (; i < count; i += lanes) {
    const std::size_t n = count - i < lanes ? count - i : lanes;
    HWY_ALIGN typename From::Stored last[hn::MaxLanes(d)] = {};
    HWY_ALIGN typename To::Stored result[hn::MaxLanes(d)];
    std::memcpy(last, from + i, n * sizeof(last[0]));
    To::Store(d, factor.Apply(d, From::Load(d, last)), result);
    std::memcpy(to + i, result, n * sizeof(result[0]));
  }
}

using TransformFunction = void (*)(const void*, void*, std::size_t, Scale);

// The scale is applied in the wider of the two types, at least float32. Half types are not
// converted to each other.
template <class From>
TransformFunction TransformFrom(core::DType to) {
  constexpr bool kFromDouble = std::is_same_v<From, AsItIs<double>>;
  constexpr bool kFromHalf = std::is_same_v<typename From::Stored, std::uint16_t>;
  using Least = std::conditional_t<kFromDouble, double, float>;
  if constexpr (!kFromHalf) {
    if (to == core::DType::kF16) return Transform<Least, From, Float16>;
    if (to == core::DType::kBF16) return Transform<Least, From, BFloat16>;
  }
  if (to == core::DType::kF32) return Transform<Least, From, AsItIs<float>>;
  if (to == core::DType::kF64) return Transform<double, From, AsItIs<double>>;
  return nullptr;
}

TransformFunction TransformOf(core::DType from, core::DType to) {
  switch (from) {
    case core::DType::kF16:
      return TransformFrom<Float16>(to);
    case core::DType::kBF16:
      return TransformFrom<BFloat16>(to);
    case core::DType::kF32:
      return TransformFrom<AsItIs<float>>(to);
    case core::DType::kF64:
      return TransformFrom<AsItIs<double>>(to);
    default:
      return nullptr;
  }
}

TransformFunction TransformThrough(core::DType half) {
  if (half == core::DType::kF16) return Transform<float, AsItIs<float>, Through<Float16>>;
  if (half == core::DType::kBF16) return Transform<float, AsItIs<float>, Through<BFloat16>>;
  return nullptr;
}

// Truncated toward zero; beyond the type's range the end that is nearer.
template <typename To>
To TruncatedTo(double value) {
  using Limits = std::numeric_limits<To>;
  // The greatest number of 64 bits is no double: the one above it is.
  constexpr double kAbove = static_cast<double>(Limits::max() / 2 + 1) * 2;
  if (!(value < kAbove)) return Limits::max();
  if (value <= static_cast<double>(Limits::lowest())) return Limits::lowest();
  return static_cast<To>(value);
}

// Divisions go through float64 up to 32 bits: exact, and the compiler makes vectors of it. The
// divisor may exceed the type's own range.
template <typename From, typename To>
void ScaleIntegers(const void* in, void* out, std::int64_t count, Scale scale) {
  constexpr bool kWide = sizeof(From) == 8;
  using Dividend = std::conditional_t<kWide, std::int64_t, double>;
  using Quotient = std::conditional_t<kWide, std::int64_t, std::int32_t>;
  const auto* const from = static_cast<const From*>(in);
  auto* const to = static_cast<To*>(out);
  if (scale.factor != 1.0) {
    // The tensor's type is the narrower one.
    using Narrow = std::conditional_t<sizeof(From) < sizeof(To), From, To>;
    const auto by = static_cast<double>(scale.divisor);
    for (std::int64_t i = 0; i < count; ++i) {
      to[i] = TruncatedTo<Narrow>(static_cast<double>(from[i]) * scale.factor / by);
    }
    return;
  }
  if (scale.divisor == 1) {
    for (std::int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<To>(static_cast<std::int64_t>(from[i]));
    }
    return;
  }
  const auto divisor = static_cast<Dividend>(scale.divisor);
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<To>(static_cast<Quotient>(static_cast<Dividend>(from[i]) / divisor));
  }
}

using IntegerFunction = void (*)(const void*, void*, std::int64_t, Scale);

// An integer type, or one and what its average is kept in.
IntegerFunction IntegersOf(core::DType from, core::DType to) {
  using core::DType;
  const bool same = from == to;
  switch (from) {
    case DType::kU8:
      return same ? ScaleIntegers<std::uint8_t, std::uint8_t>
                  : ScaleIntegers<std::uint8_t, std::int32_t>;
    case DType::kI8:
      return same ? ScaleIntegers<std::int8_t, std::int8_t>
                  : ScaleIntegers<std::int8_t, std::int32_t>;
    case DType::kI16:
      return same ? ScaleIntegers<std::int16_t, std::int16_t>
                  : ScaleIntegers<std::int16_t, std::int32_t>;
    case DType::kI32:
      if (to == DType::kU8) return ScaleIntegers<std::int32_t, std::uint8_t>;
      if (to == DType::kI8) return ScaleIntegers<std::int32_t, std::int8_t>;
      if (to == DType::kI16) return ScaleIntegers<std::int32_t, std::int16_t>;
      return same ? ScaleIntegers<std::int32_t, std::int32_t>
                  : ScaleIntegers<std::int32_t, std::int64_t>;
    default:
      return same ? ScaleIntegers<std::int64_t, std::int64_t>
                  : ScaleIntegers<std::int64_t, std::int32_t>;
  }
}

}  // namespace sirtaki::fusion::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sirtaki::fusion {
namespace {

HWY_EXPORT(TransformOf);
HWY_EXPORT(TransformThrough);
HWY_EXPORT(IntegersOf);

bool AreIntegersOfOneAverage(core::DType from, core::DType to) {
  const auto kept = [](core::DType dtype) {
    return AccumulationType(dtype, core::ReduceOp::kAverage);
  };
  return core::IsInteger(from) && (from == to || kept(from) == to || kept(to) == from);
}

}  // namespace

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
  if (from == to && scale.identity()) {
    if (in != out) std::memcpy(out, in, static_cast<std::size_t>(count) * core::SizeOf(from));
    return;
  }
  if (AreIntegersOfOneAverage(from, to)) {
    return HWY_DYNAMIC_DISPATCH(IntegersOf)(from, to)(in, out, count, scale);
  }
  const auto transform = HWY_DYNAMIC_DISPATCH(TransformOf)(from, to);
  SIRTAKI_CHECK(transform != nullptr,
                "only floating types but half to half, and an integer type and what its averages "
                "are kept in, are converted or scaled");
  transform(in, out, static_cast<std::size_t>(count), scale);
}

void RoundThrough(core::DType half, float* values, std::int64_t count, Scale scale) {
  if (count <= 0) return;
  const auto transform = HWY_DYNAMIC_DISPATCH(TransformThrough)(half);
  SIRTAKI_CHECK(transform != nullptr, "float16 and bfloat16 are the types to round through");
  transform(values, values, static_cast<std::size_t>(count), scale);
}

}  // namespace sirtaki::fusion
#endif  // HWY_ONCE
