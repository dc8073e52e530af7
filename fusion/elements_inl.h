// Elements as vectors: loaded and widened, scaled, rounded and stored. By Highway: included once
// for each instruction set by the sources that are compiled so (hwy/foreach_target.h).
//
// A format says how a type lies in memory. Load gives a vector of the type that is computed with,
// Store rounds one; both take memory of any alignment that suits the type.

#if defined(SIRTAKI_FUSION_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SIRTAKI_FUSION_ELEMENTS_INL_H_
#undef SIRTAKI_FUSION_ELEMENTS_INL_H_
#else
#define SIRTAKI_FUSION_ELEMENTS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fusion/convert.h"

HWY_BEFORE_NAMESPACE();
namespace sirtaki::fusion::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// The conversion is between float32, which half types become first, and the type that is computed
// with.
template <class D>
using FloatTag = hn::Rebind<float, D>;

template <class D>
HWY_INLINE hn::Vec<D> FromFloat([[maybe_unused]] D d, hn::Vec<FloatTag<D>> value) {
  if constexpr (std::is_same_v<hn::TFromD<D>, float>) {
    return value;
  } else {
    return hn::PromoteTo(d, value);
  }
}

template <class D>
HWY_INLINE hn::Vec<FloatTag<D>> ToFloat(D /*d*/, hn::Vec<D> value) {
  if constexpr (std::is_same_v<hn::TFromD<D>, float>) {
    return value;
  } else {
#if HWY_TARGET == HWY_SCALAR
    // Highway's own gives the greatest number where infinity is right.
    return hn::Set(FloatTag<D>(), static_cast<float>(hn::GetLane(value)));
#else
    return hn::DemoteTo(FloatTag<D>(), value);
#endif
  }
}

template <typename T>
struct AsItIs {
  using Stored = T;

  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const T* from) {
    if constexpr (std::is_same_v<hn::TFromD<D>, T>) {
      return hn::LoadU(d, from);
    } else {
      static_assert(std::is_same_v<T, float>, "only float32 is widened to float64");
      return FromFloat(d, hn::LoadU(FloatTag<D>(), from));
    }
  }

  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, T* to) {
    if constexpr (std::is_same_v<hn::TFromD<D>, T>) {
      hn::StoreU(value, d, to);
    } else {
      hn::StoreU(ToFloat(d, value), FloatTag<D>(), to);
    }
  }
};

// Vectors of half types are the low halves of 32-bit lanes.
template <class DF>
using BitsTag = hn::Rebind<std::uint32_t, DF>;
template <class DF>
using WordTag = hn::Rebind<std::uint16_t, DF>;

template <class DF>
HWY_INLINE void StoreWords(DF /*df*/, hn::Vec<BitsTag<DF>> bits, std::uint16_t* to) {
  const WordTag<DF> d16;
  hn::StoreU(hn::TruncateTo(d16, bits), d16, to);
}

struct BFloat16 {
  using Stored = std::uint16_t;

  template <class DF>
  static HWY_INLINE hn::Vec<DF> Widen(DF df, const std::uint16_t* from) {
    const BitsTag<DF> du;
    const auto bits = hn::PromoteTo(du, hn::LoadU(WordTag<DF>(), from));
    return hn::BitCast(df, hn::ShiftLeft<16>(bits));
  }

  // Rounding is done here, because Highway's DemoteTo cuts off.
  template <class DF>
  static HWY_INLINE hn::Vec<BitsTag<DF>> Round(DF /*df*/, hn::Vec<DF> value) {
    const BitsTag<DF> du;
    const auto bits = hn::BitCast(du, value);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7fff)), odd);
    const auto quiet = hn::Or(bits, hn::Set(du, 0x400000));
    const auto nan = hn::RebindMask(du, hn::IsNaN(value));
    return hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, rounded));
  }

  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const std::uint16_t* from) {
    return FromFloat(d, Widen(FloatTag<D>(), from));
  }

  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, std::uint16_t* to) {
    const FloatTag<D> df;
    StoreWords(df, Round(df, ToFloat(d, value)), to);
  }
};

// Where the processor converts float16 itself. Elsewhere Highway's own conversion neither rounds
// nor knows infinities.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
#define SIRTAKI_NATIVE_FLOAT16 1
#else
#define SIRTAKI_NATIVE_FLOAT16 0
#endif

struct Float16 {
  using Stored = std::uint16_t;

  template <class D>
  static HWY_INLINE hn::Vec<D> Load(D d, const std::uint16_t* from) {
    return FromFloat(d, Widen(FloatTag<D>(), from));
  }

  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, std::uint16_t* to) {
#if SIRTAKI_NATIVE_FLOAT16
    const WordTag<D> d16;
    const hn::Rebind<hwy::float16_t, D> dh;
    hn::StoreU(hn::BitCast(d16, hn::DemoteTo(dh, ToFloat(d, value))), d16, to);
#else
    const FloatTag<D> df;
    StoreWords(df, Round(df, ToFloat(d, value)), to);
#endif
  }

 private:
  template <class DF>
  static HWY_INLINE hn::Vec<DF> Widen(DF df, const std::uint16_t* from) {
    const auto halves = hn::LoadU(WordTag<DF>(), from);
#if SIRTAKI_NATIVE_FLOAT16
    const hn::Rebind<hwy::float16_t, DF> dh;
    return hn::PromoteTo(df, hn::BitCast(dh, halves));
#else
    const BitsTag<DF> du;
    const hn::Rebind<std::int32_t, DF> di;
    const auto bits = hn::PromoteTo(du, halves);
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fff));
    const auto signed_magnitude = hn::BitCast(di, magnitude);
    const auto sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
    const auto bias = hn::Set(du, 112u << 23);
    const auto normal = hn::Add(hn::ShiftLeft<13>(magnitude), bias);
    // Exponent 31 becomes 255; a signalling NaN becomes quiet, as in the processor's conversion.
    const auto nan = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x7c00)));
    const auto special =
        hn::Or(hn::Add(normal, bias), hn::IfThenElseZero(nan, hn::Set(du, 0x400000)));
    // Below 2^-14 a half is a whole number of 2^-24, and that product is exact. Nothing subnormal
    // in float32 is involved, so flush-to-zero modes do no harm.
    const auto subnormal =
        hn::BitCast(du, hn::Mul(hn::ConvertTo(df, signed_magnitude), hn::Set(df, 0x1p-24f)));
    const auto is_small = hn::RebindMask(du, hn::Lt(signed_magnitude, hn::Set(di, 0x400)));
    const auto is_special = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x7bff)));
    const auto finite = hn::IfThenElse(is_small, subnormal, normal);
    return hn::BitCast(df, hn::Or(sign, hn::IfThenElse(is_special, special, finite)));
#endif
  }

#if !SIRTAKI_NATIVE_FLOAT16
  template <class DF>
  static HWY_INLINE hn::Vec<BitsTag<DF>> Round(DF df, hn::Vec<DF> value) {
    const BitsTag<DF> du;
    const hn::Rebind<std::int32_t, DF> di;
    const auto bits = hn::BitCast(du, value);
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffff));
    const auto signed_magnitude = hn::BitCast(di, magnitude);
    const auto sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
    const auto last = hn::ShiftRight<13>(magnitude);
    // Normal: half of the last place less one, plus one if the last kept bit is odd: ties go to
    // even. A carry runs into the exponent, which is right, up to infinity.
    const auto half_less_one = hn::Set(du, 0xfffu - (112u << 23));
    const auto odd = hn::And(last, hn::Set(du, 1));
    const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, half_less_one), odd));
    // Below 2^-14 the last place is 2^-24, which is that of a float32 in [0.5, 1): adding 0.5
    // rounds there.
    const auto half = hn::Set(df, 0.5f);
    const auto subnormal =
        hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(df, magnitude), half)), hn::BitCast(du, half));
    const auto nan = hn::Or(hn::Set(du, 0x7e00), hn::And(last, hn::Set(du, 0x3ff)));
    const auto is_small = hn::RebindMask(du, hn::Lt(signed_magnitude, hn::Set(di, 0x38800000)));
    const auto is_huge = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x477fffff)));
    const auto is_nan = hn::RebindMask(du, hn::Gt(signed_magnitude, hn::Set(di, 0x7f800000)));
    const auto huge = hn::IfThenElse(is_nan, nan, hn::Set(du, 0x7c00));
    const auto finite = hn::IfThenElse(is_small, subnormal, normal);
    return hn::Or(sign, hn::IfThenElse(is_huge, huge, finite));
  }
#endif
};

// float32 in memory, as it is left by a journey as a half type.
template <class Half>
struct Through {
  using Stored = float;

  template <class D>
  static HWY_INLINE void Store(D d, hn::Vec<D> value, float* to) {
    HWY_ALIGN std::uint16_t words[hn::MaxLanes(D())];
    Half::Store(d, value, words);
    hn::StoreU(Half::Load(d, words), d, to);
  }
};

// A Scale as it is applied: one operation for each element.
template <typename T>
struct Factor {
  explicit Factor(Scale scale)
      : identity(scale.identity()),
        divides(scale.factor == 1.0 && (scale.divisor & (scale.divisor - 1)) != 0),
        value(static_cast<T>(divides ? static_cast<double>(scale.divisor)
                                     : scale.factor / static_cast<double>(scale.divisor))) {}

  template <class D>
  HWY_INLINE hn::Vec<D> Apply(D d, hn::Vec<D> operand) const {
    if (identity) return operand;
    return divides ? hn::Div(operand, hn::Set(d, value)) : hn::Mul(operand, hn::Set(d, value));
  }

  bool identity;
  bool divides;
  T value;
};

#undef SIRTAKI_NATIVE_FLOAT16

}  // namespace sirtaki::fusion::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard, one for each target
