// How two vectors become one, for each reduction. By Highway: included once for each instruction
// set (hwy/foreach_target.h).

#if defined(SIRTAKI_OPS_COMBINE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SIRTAKI_OPS_COMBINE_INL_H_
#undef SIRTAKI_OPS_COMBINE_INL_H_
#else
#define SIRTAKI_OPS_COMBINE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace sirtaki::ops::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

struct Sum {
  template <class D>
  static HWY_INLINE hn::Vec<D> Combine(D /*d*/, hn::Vec<D> a, hn::Vec<D> b) {
    return hn::Add(a, b);
  }
};

struct Product {
  template <class D>
  static HWY_INLINE hn::Vec<D> Combine(D d, hn::Vec<D> a, hn::Vec<D> b) {
    using T = hn::TFromD<D>;
    if constexpr (hwy::IsFloat<T>()) {
      return hn::Mul(a, b);
    } else if constexpr (hn::MaxLanes(D()) == 1) {  // Highway has it not for all types
      const std::uint64_t wide = hn::GetLane(a);
      return hn::Set(d, static_cast<T>(wide * hn::GetLane(b)));
    } else if constexpr (sizeof(T) > 1) {
      return hn::Mul(a, b);
    } else {  // nor of bytes; the low byte of a product depends on the low bytes alone
      const hn::Repartition<std::uint16_t, D> dw;
      const auto low = hn::Mul(hn::BitCast(dw, a), hn::BitCast(dw, b));
      const auto high =
          hn::Mul(hn::ShiftRight<8>(hn::BitCast(dw, a)), hn::ShiftRight<8>(hn::BitCast(dw, b)));
      return hn::BitCast(d, hn::Or(hn::And(low, hn::Set(dw, 0xff)), hn::ShiftLeft<8>(high)));
    }
  }
};

template <class D>
HWY_INLINE hn::Vec<D> NanIfEither(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> otherwise) {
  const auto numbers = hn::And(hn::Eq(a, a), hn::Eq(b, b));
  return hn::IfThenElse(numbers, otherwise,
                        hn::Set(d, std::numeric_limits<hn::TFromD<D>>::quiet_NaN()));
}

// Where a and b are zeros, which one Highway's minimum is depends on the processor; both orders
// give either both of them, or the right one twice.
struct Min {
  template <class D>
  static HWY_INLINE hn::Vec<D> Combine(D d, hn::Vec<D> a, hn::Vec<D> b) {
    if constexpr (hwy::IsFloat<hn::TFromD<D>>()) {
      return NanIfEither(d, a, b, hn::Or(hn::Min(a, b), hn::Min(b, a)));
    } else {
      return hn::Min(a, b);
    }
  }
};

struct Max {
  template <class D>
  static HWY_INLINE hn::Vec<D> Combine(D d, hn::Vec<D> a, hn::Vec<D> b) {
    if constexpr (hwy::IsFloat<hn::TFromD<D>>()) {
      return NanIfEither(d, a, b, hn::And(hn::Max(a, b), hn::Max(b, a)));
    } else {
      return hn::Max(a, b);
    }
  }
};

struct BitAnd {
  template <class D>
  static HWY_INLINE hn::Vec<D> Combine(D /*d*/, hn::Vec<D> a, hn::Vec<D> b) {
    return hn::And(a, b);
  }
};

struct BitOr {
  template <class D>
  static HWY_INLINE hn::Vec<D> Combine(D /*d*/, hn::Vec<D> a, hn::Vec<D> b) {
    return hn::Or(a, b);
  }
};

struct BitXor {
  template <class D>
  static HWY_INLINE hn::Vec<D> Combine(D /*d*/, hn::Vec<D> a, hn::Vec<D> b) {
    return hn::Xor(a, b);
  }
};

}  // namespace sirtaki::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard, one for each target
