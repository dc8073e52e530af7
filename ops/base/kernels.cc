#include "ops/base/kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/base/kernels.cc"
#include <hwy/foreach_target.h>
// After it, what is compiled for each target.
#include "core/base/check.h"
#include "fusion/elements_inl.h"
#include "ops/base/combine_inl.h"

HWY_BEFORE_NAMESPACE();
namespace sirtaki::ops::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace formats = fusion::HWY_NAMESPACE;
using core::DType;
using core::ReduceOp;

// --- two vectors ---

// It takes as many whole vectors as there are from element i on, and says where the rest begins.
template <class Op, class D, typename T>
HWY_INLINE std::size_t ReduceWhole(D d, T* HWY_RESTRICT to, const T* HWY_RESTRICT from,
                                   std::size_t i, std::size_t count) {
  const std::size_t lanes = hn::Lanes(d);
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    const auto low = Op::Combine(d, hn::LoadU(d, to + i), hn::LoadU(d, from + i));
    const auto high = Op::Combine(d, hn::LoadU(d, to + i + lanes), hn::LoadU(d, from + i + lanes));
    hn::StoreU(low, d, to + i);
    hn::StoreU(high, d, to + i + lanes);
  }
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(Op::Combine(d, hn::LoadU(d, to + i), hn::LoadU(d, from + i)), d, to + i);
  }
  return i;
}

template <class Op, typename T>
void ReducePair(void* accumulator, const void* addend, std::size_t count) {
  T* HWY_RESTRICT to = static_cast<T*>(accumulator);
  const T* HWY_RESTRICT from = static_cast<const T*>(addend);
  // The rest in shorter and shorter vectors: a long one that is pieced together in memory costs
  // more than all of them.
  std::size_t i = ReduceWhole<Op>(hn::ScalableTag<T>(), to, from, 0, count);
  i = ReduceWhole<Op>(hn::CappedTag<T, 16 / sizeof(T)>(), to, from, i, count);
  if constexpr (sizeof(T) < 4) {
    i = ReduceWhole<Op>(hn::CappedTag<T, 4 / sizeof(T)>(), to, from, i, count);
  }
  ReduceWhole<Op>(hn::CappedTag<T, 1>(), to, from, i, count);
}

// --- several vectors ---

struct NoFactor {
  explicit NoFactor(fusion::Scale /*scale*/) {}

  template <class D>
  HWY_INLINE hn::Vec<D> Apply(D /*d*/, hn::Vec<D> operand) const {
    return operand;
  }
};

// One pass over all members, the sums never leave the registers. T: what is computed with. An
// output may be an input: each vector is stored when all members' have been loaded.
template <class Op, class Format, typename T>
class Members {
 public:
  using Stored = typename Format::Stored;

  Members(std::span<const void* const> inputs, std::span<void* const> outputs, std::size_t count,
          fusion::Scale before, fusion::Scale after)
      : inputs_(inputs), outputs_(outputs), count_(count), before_(before), after_(after) {}

  void Run() const {
    const std::size_t lanes = hn::Lanes(D());
    std::size_t i = 0;
    for (; i + 4 * lanes <= count_; i += 4 * lanes) Four(i);
    for (; i + lanes <= count_; i += lanes) {
      auto sum = Load(Input(0) + i);
      for (std::size_t m = 1; m < inputs_.size(); ++m) {
        sum = Op::Combine(D(), sum, Load(Input(m) + i));
      }
      const auto result = after_.Apply(D(), sum);
      for (std::size_t c = 0; c < outputs_.size(); ++c) Store(result, Output(c) + i);
    }
    if (i < count_) Last(i);
  }

 private:
  using D = hn::ScalableTag<T>;
  using Vector = hn::Vec<D>;
  using Factor = std::conditional_t<hwy::IsFloat<T>(), formats::Factor<T>, NoFactor>;

  HWY_INLINE const Stored* Input(std::size_t m) const {
    return static_cast<const Stored*>(inputs_[m]);
  }
  HWY_INLINE Stored* Output(std::size_t c) const { return static_cast<Stored*>(outputs_[c]); }

  HWY_INLINE Vector Load(const Stored* from) const {
    return before_.Apply(D(), Format::Load(D(), from));
  }

  HWY_INLINE void Store(Vector value, Stored* to) const { Format::Store(D(), value, to); }

  // Four vectors at a time: whole cache lines of every member.
  HWY_INLINE void Four(std::size_t i) const {
    const D d;
    const std::size_t lanes = hn::Lanes(d);
    const Stored* const first = Input(0) + i;
    auto v0 = Load(first);
    auto v1 = Load(first + lanes);
    auto v2 = Load(first + 2 * lanes);
    auto v3 = Load(first + 3 * lanes);
    for (std::size_t m = 1; m < inputs_.size(); ++m) {
      const Stored* const from = Input(m) + i;
      v0 = Op::Combine(d, v0, Load(from));
      v1 = Op::Combine(d, v1, Load(from + lanes));
      v2 = Op::Combine(d, v2, Load(from + 2 * lanes));
      v3 = Op::Combine(d, v3, Load(from + 3 * lanes));
    }
    v0 = after_.Apply(d, v0);
    v1 = after_.Apply(d, v1);
    v2 = after_.Apply(d, v2);
    v3 = after_.Apply(d, v3);
    for (std::size_t c = 0; c < outputs_.size(); ++c) {
      Stored* const to = Output(c) + i;
      Store(v0, to);
      Store(v1, to + lanes);
      Store(v2, to + 2 * lanes);
      Store(v3, to + 3 * lanes);
    }
  }

  // Less than a vector.
  void Last(std::size_t i) const {
    const D d;
    const std::size_t bytes = (count_ - i) * sizeof(Stored);
    HWY_ALIGN Stored elements[hn::MaxLanes(d)] = {};
    std::memcpy(elements, Input(0) + i, bytes);
    auto sum = Load(elements);
    for (std::size_t m = 1; m < inputs_.size(); ++m) {
      std::memcpy(elements, Input(m) + i, bytes);
      sum = Op::Combine(d, sum, Load(elements));
    }
    Store(after_.Apply(d, sum), elements);
    for (std::size_t c = 0; c < outputs_.size(); ++c) std::memcpy(Output(c) + i, elements, bytes);
  }

  const std::span<const void* const> inputs_;
  const std::span<void* const> outputs_;
  const std::size_t count_;
  Factor before_;
  Factor after_;
};

template <class Op, class Format, typename T>
void ReduceAll(std::span<const void* const> inputs, std::span<void* const> outputs,
               std::size_t count, fusion::Scale before, fusion::Scale after) {
  Members<Op, Format, T>(inputs, outputs, count, before, after).Run();
}

// --- which one it is ---

using PairFunction = void (*)(void*, const void*, std::size_t);
using MembersFunction = void (*)(std::span<const void* const>, std::span<void* const>, std::size_t,
                                 fusion::Scale, fusion::Scale);

struct Kernels {
  PairFunction pair = nullptr;        // none for half types, which are always widened
  MembersFunction members = nullptr;  // integers take no scale here
};

template <class Op, typename T>
Kernels KernelsOf() {
  return {ReducePair<Op, T>, ReduceAll<Op, formats::AsItIs<T>, T>};
}

// Order needs signed integers as they are. Arithmetic takes them as unsigned ones: the same bits,
// and wrapping is defined.
template <class Op, bool kOrders>
Kernels KernelsOf(DType dtype) {
  using std::conditional_t;
  switch (dtype) {
    case DType::kU8:
      return KernelsOf<Op, std::uint8_t>();
    case DType::kI8:
      return KernelsOf<Op, conditional_t<kOrders, std::int8_t, std::uint8_t>>();
    case DType::kI16:
      return KernelsOf<Op, conditional_t<kOrders, std::int16_t, std::uint16_t>>();
    case DType::kI32:
      return KernelsOf<Op, conditional_t<kOrders, std::int32_t, std::uint32_t>>();
    case DType::kI64:
      return KernelsOf<Op, conditional_t<kOrders, std::int64_t, std::uint64_t>>();
    case DType::kF16:
      return {nullptr, ReduceAll<Op, formats::Float16, float>};
    case DType::kBF16:
      return {nullptr, ReduceAll<Op, formats::BFloat16, float>};
    case DType::kF32:
      return KernelsOf<Op, float>();
    case DType::kF64:
      return KernelsOf<Op, double>();
    default:
      return {};
  }
}

Kernels Find(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kSum:
      return KernelsOf<Sum, false>(dtype);
    case ReduceOp::kProduct:
      return KernelsOf<Product, false>(dtype);
    case ReduceOp::kMin:
      return KernelsOf<Min, true>(dtype);
    case ReduceOp::kMax:
      return KernelsOf<Max, true>(dtype);
    case ReduceOp::kBitAnd:
      return KernelsOf<BitAnd, std::uint8_t>();
    case ReduceOp::kBitOr:
      return KernelsOf<BitOr, std::uint8_t>();
    case ReduceOp::kBitXor:
      return KernelsOf<BitXor, std::uint8_t>();
    default:
      return {};
  }
}

PairFunction FindPair(ReduceOp op, DType dtype) { return Find(op, dtype).pair; }
MembersFunction FindMembers(ReduceOp op, DType dtype) { return Find(op, dtype).members; }

}  // namespace sirtaki::ops::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sirtaki::ops {
namespace {

HWY_EXPORT(FindPair);
HWY_EXPORT(FindMembers);

// A reduction in the words that the kernels have: complex numbers as pairs of their parts, bool
// (bytes that are 0 or 1) and what works on bits as bytes.
struct Words {
  Words(core::ReduceOp wanted, core::DType type, std::int64_t elements)
      : op(Combining(wanted)),
        dtype(core::PartType(type)),
        count(static_cast<std::size_t>(elements)) {
    if (dtype != type) count *= 2;
    if (dtype == core::DType::kBool) {
      if (op == core::ReduceOp::kMax) op = core::ReduceOp::kBitOr;
      if (op == core::ReduceOp::kMin || op == core::ReduceOp::kProduct) {
        op = core::ReduceOp::kBitAnd;
      }
    }
    if (op == core::ReduceOp::kBitAnd || op == core::ReduceOp::kBitOr ||
        op == core::ReduceOp::kBitXor) {
      count *= core::SizeOf(dtype);
    }
  }

  core::ReduceOp op;
  core::DType dtype;
  std::size_t count;
};

// Integers that are divided: block by block in a wider type.
void ReduceInBlocks(core::ReduceOp op, core::DType dtype, std::span<const void* const> inputs,
                    std::span<void* const> outputs, std::int64_t count, fusion::Scale before,
                    fusion::Scale after) {
  constexpr std::int64_t kBlock = 1024;  // both blocks stay in the cache's first level
  std::int64_t sum[kBlock];
  std::int64_t addend[kBlock];
  const core::DType wide = fusion::AccumulationType(dtype, op);
  const std::int64_t element = BytesOf(dtype);
  for (std::int64_t i = 0; i < count; i += kBlock) {
    const std::int64_t n = count - i < kBlock ? count - i : kBlock;
    std::int64_t* to = sum;
    for (const void* const input : inputs) {
      fusion::Convert(dtype, static_cast<const std::byte*>(input) + i * element, wide, to, n,
                      before);
      if (to == addend) ReduceInto(Combining(op), wide, sum, addend, n);
      to = addend;
    }
    for (void* const output : outputs) {
      fusion::Convert(wide, sum, dtype, static_cast<std::byte*>(output) + i * element, n, after);
    }
  }
}

template <typename T>
T IdentityOf(core::ReduceOp op) {
  using Limits = std::numeric_limits<T>;
  switch (op) {
    case core::ReduceOp::kMin:
      return Limits::has_infinity ? Limits::infinity() : Limits::max();
    case core::ReduceOp::kMax:
      return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    case core::ReduceOp::kProduct:
      return T{1};
    case core::ReduceOp::kBitAnd:
      return static_cast<T>(-1);
    default:
      return T{0};
  }
}

template <typename T>
void FillWith(core::ReduceOp op, void* memory, std::int64_t count) {
  std::fill_n(static_cast<T*>(memory), count, IdentityOf<T>(op));
}

}  // namespace

bool HasReduction(core::ReduceOp op, core::DType dtype) {
  return op != core::ReduceOp::kAverage && op != core::ReduceOp::kAdasum &&
         core::IsDefined(op, dtype) && !core::IsHalf(dtype) && !core::IsComplex(dtype);
}

void ReduceInto(core::ReduceOp op, core::DType dtype, void* accumulator, const void* addend,
                std::int64_t count) {
  SIRTAKI_CHECK(HasReduction(op, dtype), "this type has no such reduction of its own");
  const Words words(op, dtype, count);
  HWY_DYNAMIC_DISPATCH(FindPair)(words.op, words.dtype)(accumulator, addend, words.count);
}

void FillIdentity(core::ReduceOp op, core::DType dtype, void* memory, std::int64_t count) {
  using core::DType;
  SIRTAKI_CHECK(core::IsDefined(op, dtype), "this type has no such reduction");
  switch (dtype) {
    case DType::kU8:
      return FillWith<std::uint8_t>(op, memory, count);
    case DType::kI8:
      return FillWith<std::int8_t>(op, memory, count);
    case DType::kI16:
      return FillWith<std::int16_t>(op, memory, count);
    case DType::kI32:
      return FillWith<std::int32_t>(op, memory, count);
    case DType::kI64:
      return FillWith<std::int64_t>(op, memory, count);
    case DType::kF32:
      return FillWith<float>(op, memory, count);
    case DType::kF64:
      return FillWith<double>(op, memory, count);
    case DType::kBool:
      return FillWith<bool>(op, memory, count);
    case DType::kF16:
    case DType::kBF16: {
      const auto wide = IdentityOf<float>(op);
      std::uint16_t half = 0;
      fusion::Convert(DType::kF32, &wide, dtype, &half, 1);
      std::fill_n(static_cast<std::uint16_t*>(memory), count, half);
      return;
    }
    default:  // complex numbers: sums alone
      std::memset(memory, 0, static_cast<std::size_t>(count) * core::SizeOf(dtype));
  }
}

void ReduceMembers(core::ReduceOp op, core::DType dtype, std::span<const void* const> inputs,
                   std::span<void* const> outputs, std::int64_t count, fusion::Scale before,
                   fusion::Scale after) {
  SIRTAKI_CHECK(core::IsDefined(op, dtype) && op != core::ReduceOp::kAdasum,
                "this type has no such reduction");
  const bool scales = !before.identity() || !after.identity();
  const bool floating = core::IsFloating(core::PartType(dtype));
  if (!floating && (scales || op == core::ReduceOp::kAverage)) {
    return ReduceInBlocks(op, dtype, inputs, outputs, count, before, after);
  }
  const Words words(op, dtype, count);
  HWY_DYNAMIC_DISPATCH(FindMembers)
  (words.op, words.dtype)(inputs, outputs, words.count, before, after);
}

void ReduceParts(core::ReduceOp op, core::DType dtype, void* parts, std::int64_t members,
                 std::int64_t count, fusion::Scale before, fusion::Scale after) {
  const std::int64_t bytes = count * BytesOf(dtype);
  std::vector<const void*> inputs(static_cast<std::size_t>(members));
  for (std::size_t m = 0; m < inputs.size(); ++m) {
    inputs[m] = static_cast<std::byte*>(parts) + static_cast<std::int64_t>(m) * bytes;
  }
  ReduceMembers(op, dtype, inputs, {&parts, 1}, count, before, after);
}

}  // namespace sirtaki::ops
#endif  // HWY_ONCE
