#include "ops/base/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/support/each_target.h"
#include "tests/support/naive_reduction.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::ReduceOp;
using tests::Agree;
using tests::DTypeOf;
using tests::Naive;
using tests::SameBits;
using tests::WorthCombining;

class KernelsTest : public tests::EachTargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, KernelsTest, tests::Targets(), tests::TargetOf);

constexpr ReduceOp kOps[] = {ReduceOp::kSum,   ReduceOp::kAverage, ReduceOp::kMin,
                             ReduceOp::kMax,   ReduceOp::kProduct, ReduceOp::kBitAnd,
                             ReduceOp::kBitOr, ReduceOp::kBitXor,  ReduceOp::kAdasum};
static_assert(std::size(kOps) == core::kReduceOpCount);

template <typename T>
std::vector<ReduceOp> OpsOf() {
  std::vector<ReduceOp> ops;
  for (const ReduceOp op : kOps) {
    if (HasReduction(op, DTypeOf<T>())) ops.push_back(op);
  }
  return ops;
}

// Calls `body` with a value of each type that two vectors are combined in.
template <class Body>
void ForEachType(Body body) {
  body(std::uint8_t{});
  body(std::int8_t{});
  body(std::int16_t{});
  body(std::int32_t{});
  body(std::int64_t{});
  body(float{});
  body(double{});
  body(bool{});
}

// `count` elements that start `shift` elements behind a multiple of any vector's size, with a guard
// on either side.
template <typename T>
class Vector {
 public:
  Vector(std::size_t count, std::size_t shift)
      : memory_(count + shift + 2 * kGuard + kAlign, kGuarding) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data() + kGuard);
    constexpr std::size_t kBytes = kAlign * sizeof(T);
    first_ = kGuard + (kBytes - address % kBytes) % kBytes / sizeof(T) + shift;
    count_ = count;
  }
  T* data() { return reinterpret_cast<T*>(memory_.data()) + first_; }
  T& operator[](std::size_t i) { return data()[i]; }
  bool GuardsAreWhole() const {
    return memory_[first_ - 1] == kGuarding && memory_[first_ + count_] == kGuarding;
  }

 private:
  // A std::vector<bool> has no memory of bools.
  using Element = std::conditional_t<std::is_same_v<T, bool>, std::uint8_t, T>;
  static constexpr std::size_t kGuard = 1;
  static constexpr Element kGuarding = 77;
  static constexpr std::size_t kAlign = 64;

  std::vector<Element> memory_;
  std::size_t first_;
  std::size_t count_;
};

template <typename T>
void ExpectNaive(ReduceOp op, std::size_t count, std::size_t shift, std::size_t from) {
  const std::vector<std::pair<T, T>>& pairs = WorthCombining<T>();
  Vector<T> to(count, shift);
  Vector<T> addend(count, 3 * shift % 5);
  for (std::size_t i = 0; i < count; ++i) {
    std::tie(to[i], addend[i]) = pairs[(from + i) % pairs.size()];
  }
  ReduceInto(op, DTypeOf<T>(), to.data(), addend.data(), static_cast<std::int64_t>(count));
  for (std::size_t i = 0; i < count; ++i) {
    const auto& [a, b] = pairs[(from + i) % pairs.size()];
    ASSERT_TRUE(Agree(op, to[i], Naive(op, a, b)))
        << core::ReduceOpName(op) << " of " << core::DTypeName(DTypeOf<T>()) << " " << +a << " and "
        << +b << " is " << +to[i] << ", element " << i << " of " << count;
    ASSERT_TRUE(SameBits(addend[i], b)) << "what is added was changed";
  }
  ASSERT_TRUE(to.GuardsAreWhole()) << "written beyond the ends";
}

TEST_P(KernelsTest, EveryReductionOfEveryLengthAndAlignment) {
  ForEachType([](auto zero) {
    using T = decltype(zero);
    for (const ReduceOp op : OpsOf<T>()) {
      for (std::size_t count = 0; count <= 150; count += count < 70 ? 1 : 13) {
        for (const std::size_t shift : {0, 1, 3}) ExpectNaive<T>(op, count, shift, 7 * count);
      }
    }
  });
}

// Infinities, zeros of both signs, NaN of several kinds, the integers' ends: each with each.
TEST_P(KernelsTest, EveryReductionOfEveryPairWorthCombining) {
  ForEachType([](auto zero) {
    using T = decltype(zero);
    for (const ReduceOp op : OpsOf<T>()) ExpectNaive<T>(op, WorthCombining<T>().size(), 1, 0);
  });
}

template <typename T>
T Reduced(ReduceOp op, T a, T b) {
  // Enough for whole vectors: those and what is left over must agree.
  std::vector<T> to(131, a);
  const std::vector<T> from(131, b);
  ReduceInto(op, DTypeOf<T>(), to.data(), from.data(), 131);
  for (const T element : to) EXPECT_TRUE(SameBits(element, to[0]));
  return to[0];
}

TEST_P(KernelsTest, IntegersWrap) {
  using Byte = std::numeric_limits<std::int8_t>;
  using Long = std::numeric_limits<std::int64_t>;
  EXPECT_EQ(Reduced<std::int8_t>(ReduceOp::kSum, Byte::max(), 1), Byte::min());
  EXPECT_EQ(Reduced<std::uint8_t>(ReduceOp::kProduct, 16, 17), 16);
  EXPECT_EQ(Reduced<std::int16_t>(ReduceOp::kProduct, 256, 256), 0);
  EXPECT_EQ(Reduced<std::int32_t>(ReduceOp::kProduct, 65536, 32768),
            std::numeric_limits<std::int32_t>::min());
  EXPECT_EQ(Reduced<std::int64_t>(ReduceOp::kSum, Long::min(), -1), Long::max());
  EXPECT_EQ(Reduced<std::int64_t>(ReduceOp::kProduct, Long::min(), -1), Long::min());
}

template <typename T>
void ExpectNanWinsAndZerosAreOrdered() {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    for (const T other : {T{1}, -nan, std::numeric_limits<T>::infinity()}) {
      EXPECT_TRUE(SameBits(Reduced<T>(op, nan, other), nan));
      EXPECT_TRUE(SameBits(Reduced<T>(op, other, nan), nan));
      EXPECT_TRUE(SameBits(Reduced<T>(op, other, -nan), nan)) << "always the same NaN";
    }
  }
  EXPECT_TRUE(std::signbit(Reduced<T>(ReduceOp::kMin, T{0}, -T{0})));
  EXPECT_TRUE(std::signbit(Reduced<T>(ReduceOp::kMin, -T{0}, T{0})));
  EXPECT_FALSE(std::signbit(Reduced<T>(ReduceOp::kMax, T{0}, -T{0})));
  EXPECT_FALSE(std::signbit(Reduced<T>(ReduceOp::kMax, -T{0}, T{0})));
}

TEST_P(KernelsTest, NanWinsAndMinusZeroIsLess) {
  ExpectNanWinsAndZerosAreOrdered<float>();
  ExpectNanWinsAndZerosAreOrdered<double>();
}

TEST(KernelsTableTest, WhatIsCombinedAsItIs) {
  for (const DType dtype : {DType::kU8, DType::kI8, DType::kI16, DType::kI32, DType::kI64}) {
    for (const ReduceOp op : kOps) {
      EXPECT_EQ(HasReduction(op, dtype), op != ReduceOp::kAverage && op != ReduceOp::kAdasum);
    }
  }
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const ReduceOp op : kOps) {
      EXPECT_EQ(HasReduction(op, dtype), op == ReduceOp::kSum || op == ReduceOp::kProduct ||
                                             op == ReduceOp::kMin || op == ReduceOp::kMax);
    }
  }
  EXPECT_FALSE(HasReduction(ReduceOp::kSum, DType::kBool));
  EXPECT_TRUE(HasReduction(ReduceOp::kProduct, DType::kBool));
  EXPECT_TRUE(HasReduction(ReduceOp::kBitXor, DType::kBool));
  for (const ReduceOp op : kOps) {
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kC64, DType::kC128,
                              DType::kF8E4M3FN, DType::kF8E8M0FNU}) {
      EXPECT_FALSE(HasReduction(op, dtype));
    }
  }
}

TEST_P(KernelsTest, AnIdentityLeavesTheOtherAsItIs) {
  ForEachType([](auto zero) {
    using T = decltype(zero);
    for (const ReduceOp op : OpsOf<T>()) {
      const std::size_t count = WorthCombining<T>().size();
      Vector<T> to(count, 0);
      Vector<T> identity(count, 1);
      FillIdentity(op, DTypeOf<T>(), identity.data(), static_cast<std::int64_t>(count));
      EXPECT_TRUE(identity.GuardsAreWhole());
      for (std::size_t i = 0; i < count; ++i) to[i] = WorthCombining<T>()[i].first;
      ReduceInto(op, DTypeOf<T>(), to.data(), identity.data(), static_cast<std::int64_t>(count));
      for (std::size_t i = 0; i < count; ++i) {
        const T before = WorthCombining<T>()[i].first;
        // By value: -0 + 0 is 0, and a NaN may be another one.
        EXPECT_TRUE(to[i] == before || (to[i] != to[i] && before != before))
            << core::ReduceOpName(op) << " of " << core::DTypeName(DTypeOf<T>()) << " " << +before;
      }
    }
  });
}

TEST(KernelsTableTest, IdentitiesOfHalfAndComplexTypes) {
  const auto half = [](ReduceOp op, DType dtype) {
    std::uint16_t bits[3] = {1, 2, 3};
    FillIdentity(op, dtype, bits, 2);
    EXPECT_EQ(bits[0], bits[1]);
    EXPECT_EQ(bits[2], 3);
    return bits[0];
  };
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kAdasum}) {
    EXPECT_EQ(half(op, DType::kF16), 0);
    EXPECT_EQ(half(op, DType::kBF16), 0);
  }
  EXPECT_EQ(half(ReduceOp::kMin, DType::kF16), 0x7c00);
  EXPECT_EQ(half(ReduceOp::kMax, DType::kF16), 0xfc00);
  EXPECT_EQ(half(ReduceOp::kProduct, DType::kF16), 0x3c00);
  EXPECT_EQ(half(ReduceOp::kMin, DType::kBF16), 0x7f80);
  EXPECT_EQ(half(ReduceOp::kMax, DType::kBF16), 0xff80);
  EXPECT_EQ(half(ReduceOp::kProduct, DType::kBF16), 0x3f80);
  double complex[5] = {1, 2, 3, 4, 5};
  FillIdentity(ReduceOp::kAverage, DType::kC128, complex, 2);
  EXPECT_THAT(complex, ::testing::ElementsAre(0, 0, 0, 0, 5));
}

TEST(KernelsDeathTest, WhatIsNotDefinedIsABug) {
  bool a = true;
  const bool b = true;
  std::uint16_t halves[2] = {};
  EXPECT_DEATH(ReduceInto(ReduceOp::kSum, DType::kBool, &a, &b, 1), "no such reduction");
  EXPECT_DEATH(ReduceInto(ReduceOp::kSum, DType::kF16, halves, halves + 1, 1), "no such reduction");
  EXPECT_DEATH(FillIdentity(ReduceOp::kSum, DType::kBool, &a, 1), "no such reduction");
  EXPECT_DEATH(ReduceParts(ReduceOp::kAdasum, DType::kF32, &a, 1, 0, {}, {}), "no such reduction");
}

}  // namespace
}  // namespace sirtaki::ops
