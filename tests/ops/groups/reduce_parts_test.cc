#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/base/kernels.h"
#include "tests/support/each_target.h"
#include "tests/support/half_reference.h"
#include "tests/support/naive_reduction.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::ReduceOp;
using fusion::Scale;
using tests::Agree;
using tests::DTypeOf;
using tests::Naive;

class ReducePartsTest : public tests::EachTargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, ReducePartsTest, tests::Targets(), tests::TargetOf);

constexpr std::size_t kCounts[] = {0, 1, 2, 7, 15, 31, 32, 33, 64, 69, 127, 128, 131, 1023, 5003};
constexpr std::size_t kMembers[] = {1, 2, 3, 4, 5};
constexpr std::pair<Scale, Scale> kScales[] = {
    {{}, {}},
    {{}, {.divisor = 3}},
    {{.factor = 0.3}, {.divisor = 4}},
    {{.divisor = 5}, {.factor = 1.7, .divisor = 3}},
};

template <typename T>
T Scaled(T value, Scale scale) {
  if (scale.identity()) return value;
  const bool power_of_two = (scale.divisor & (scale.divisor - 1)) == 0;
  if (scale.factor == 1.0 && !power_of_two) return value / static_cast<T>(scale.divisor);
  return value * static_cast<T>(scale.factor / static_cast<double>(scale.divisor));
}

// T: a floating type, in itself. `parts` are widened already.
template <typename T>
T NaiveParts(ReduceOp op, const std::vector<T>& parts, std::size_t members, std::size_t i,
             Scale before, Scale after) {
  const std::size_t count = parts.size() / members;
  T all = Scaled(parts[i], before);
  for (std::size_t m = 1; m < members; ++m) {
    all = Naive(op, all, Scaled(parts[m * count + i], before));
  }
  return Scaled(all, after);
}

template <class Body>
void ForEachShape(Body body) {
  for (const std::size_t count : kCounts) {
    for (const std::size_t members : kMembers) body(members, count);
  }
}

std::vector<ReduceOp> FloatingOps() {
  return {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
}

template <typename T>
void ExpectNaive(ReduceOp op, const std::vector<T>& parts, std::size_t members, Scale before,
                 Scale after) {
  const std::size_t count = parts.size() / members;
  // One element off any vector's alignment.
  std::vector<T> memory(parts.size() + 1);
  std::copy(parts.begin(), parts.end(), memory.begin() + 1);
  ReduceParts(op, DTypeOf<T>(), memory.data() + 1, static_cast<std::int64_t>(members),
              static_cast<std::int64_t>(count), before, after);
  for (std::size_t i = 0; i < count; ++i) {
    const T expected = NaiveParts(op, parts, members, i, before, after);
    ASSERT_TRUE(Agree(op, memory[i + 1], expected))
        << core::ReduceOpName(op) << ", " << members << " members, element " << i << " of " << count
        << ": " << memory[i + 1] << ", not " << expected;
  }
  for (std::size_t i = count; i < parts.size(); ++i) {
    ASSERT_TRUE(tests::SameBits(memory[i + 1], parts[i])) << "the others' parts were changed";
  }
}

template <typename T>
void ExpectFloating() {
  std::mt19937_64 random(tests::TestSeed());
  std::uniform_real_distribution<T> distribution(T{-100}, T{100});
  const std::vector<T> special = tests::WorthCombiningAlone<T>();
  ForEachShape([&](std::size_t members, std::size_t count) {
    std::vector<T> parts(members * count);
    for (T& f : parts)
      f = random() % 8 == 0 ? special[random() % special.size()] : distribution(random);
    for (const ReduceOp op : FloatingOps()) {
      for (const auto& [before, after] : kScales) ExpectNaive(op, parts, members, before, after);
    }
  });
}

TEST_P(ReducePartsTest, Float32InItself) { ExpectFloating<float>(); }
TEST_P(ReducePartsTest, Float64InItself) { ExpectFloating<double>(); }

void ExpectHalf(DType dtype, const tests::SmallFloat& format, ReduceOp op, std::size_t members,
                std::size_t count, Scale before, Scale after, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint16_t> parts(members * count);
  std::vector<float> wide(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    // Any bits, NaN among them, and often such as do not overflow.
    parts[i] = random() % 2 == 0 ? static_cast<std::uint16_t>(random())
                                 : format.Encode(static_cast<double>(random() % 1001) / 16 - 30);
    wide[i] = static_cast<float>(format.Decode(parts[i]));
  }
  std::vector<std::uint16_t> reduced = parts;
  ReduceParts(op, dtype, reduced.data(), static_cast<std::int64_t>(members),
              static_cast<std::int64_t>(count), before, after);
  for (std::size_t i = 0; i < count; ++i) {
    const float expected = NaiveParts(op, wide, members, i, before, after);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(format.Decode(reduced[i])));
    } else {
      ASSERT_EQ(reduced[i], format.Encode(expected))
          << core::ReduceOpName(op) << ", " << members << " members, element " << i << " of "
          << count;
    }
  }
  for (std::size_t i = count; i < parts.size(); ++i) ASSERT_EQ(reduced[i], parts[i]);
}

TEST_P(ReducePartsTest, HalvesInFloatRoundedOnce) {
  const std::uint64_t seed = tests::TestSeed();
  for (const auto& [dtype, format] :
       {std::pair{DType::kF16, tests::kFloat16}, {DType::kBF16, tests::kBFloat16}}) {
    ForEachShape([&, type = dtype, form = format](std::size_t members, std::size_t count) {
      for (const ReduceOp op : FloatingOps()) {
        for (const auto& [before, after] : kScales) {
          ExpectHalf(type, form, op, members, count, before, after, seed + count);
        }
      }
    });
  }
}

TEST_P(ReducePartsTest, ANanOfHalvesIsAlwaysTheSame) {
  for (const auto& [dtype, nan] : {std::pair{DType::kF16, 0x7e00}, {DType::kBF16, 0x7fc0}}) {
    for (const int other : {0xffff, 0x3c00, 0x7c01}) {
      for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
        std::vector<std::uint16_t> parts(2 * 37, 0xffff);
        std::fill(parts.begin() + 37, parts.end(), static_cast<std::uint16_t>(other));
        ReduceParts(op, dtype, parts.data(), 2, 37, {}, {});
        for (int i = 0; i < 37; ++i) ASSERT_EQ(parts[static_cast<std::size_t>(i)], nan);
      }
    }
  }
}

template <typename T>
void ExpectIntegers() {
  const std::vector<T> special = tests::WorthCombiningAlone<T>();
  ForEachShape([&](std::size_t members, std::size_t count) {
    std::vector<T> parts(members * count);
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i] = special[i * i % special.size()];
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct,
                              ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
      if (!core::IsDefined(op, DTypeOf<T>())) continue;
      std::vector<T> reduced = parts;
      ReduceParts(op, DTypeOf<T>(), reduced.data(), static_cast<std::int64_t>(members),
                  static_cast<std::int64_t>(count), {}, {});
      for (std::size_t i = 0; i < count; ++i) {
        T expected = parts[i];
        for (std::size_t m = 1; m < members; ++m) {
          expected = Naive(op, expected, parts[m * count + i]);
        }
        ASSERT_EQ(reduced[i], expected) << core::ReduceOpName(op) << " of " << members;
      }
      for (std::size_t i = count; i < parts.size(); ++i) ASSERT_EQ(reduced[i], parts[i]);
    }
  });
}

TEST_P(ReducePartsTest, IntegersInThemselves) {
  ExpectIntegers<std::uint8_t>();
  ExpectIntegers<std::int8_t>();
  ExpectIntegers<std::int16_t>();
  ExpectIntegers<std::int32_t>();
  ExpectIntegers<std::int64_t>();
}

TEST_P(ReducePartsTest, BoolIsAByteThatIsZeroOrOne) {
  for (const std::size_t count : kCounts) {
    // Every pair of two members.
    std::vector<std::uint8_t> parts(2 * count);
    for (std::size_t i = 0; i < count; ++i) {
      parts[i] = i % 2;
      parts[count + i] = i / 2 % 2;
    }
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kBitAnd,
                              ReduceOp::kBitOr, ReduceOp::kBitXor}) {
      std::vector<std::uint8_t> reduced = parts;
      ReduceParts(op, DType::kBool, reduced.data(), 2, static_cast<std::int64_t>(count), {}, {});
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(reduced[i], Naive<bool>(op, parts[i] != 0, parts[count + i] != 0) ? 1 : 0);
      }
    }
  }
}

// The sum of five does not wrap before it is divided.
template <typename T>
void ExpectAverage() {
  for (const std::size_t count : kCounts) {
    for (const std::size_t members : kMembers) {
      const std::vector<T> special = tests::WorthCombiningAlone<T>();
      std::vector<T> parts(members * count);
      for (std::size_t i = 0; i < parts.size(); ++i) parts[i] = special[i * i % special.size()];
      std::vector<T> reduced = parts;
      ReduceParts(ReduceOp::kAverage, DTypeOf<T>(), reduced.data(),
                  static_cast<std::int64_t>(members), static_cast<std::int64_t>(count), {},
                  {.divisor = static_cast<std::int64_t>(members)});
      for (std::size_t i = 0; i < count; ++i) {
        std::int64_t sum = 0;
        for (std::size_t m = 0; m < members; ++m) sum += parts[m * count + i];
        ASSERT_EQ(reduced[i], static_cast<T>(sum / static_cast<std::int64_t>(members)));
      }
    }
  }
}

TEST_P(ReducePartsTest, AnAverageOfIntegersIsTruncatedTowardZero) {
  ExpectAverage<std::uint8_t>();
  ExpectAverage<std::int8_t>();
  ExpectAverage<std::int16_t>();
  ExpectAverage<std::int32_t>();
  std::int64_t wide[] = {-7, 9, 4, -2};
  ReduceParts(ReduceOp::kAverage, DType::kI64, wide, 2, 2, {}, {.divisor = 2});
  EXPECT_EQ(wide[0], -1);
  EXPECT_EQ(wide[1], 3);
}

TEST_P(ReducePartsTest, ComplexNumbersArePairs) {
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{131}}) {
    std::vector<float> parts(3 * 2 * count);
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i] = static_cast<float>(i * 37 % 101) / 8;
    std::vector<float> reduced = parts;
    ReduceParts(ReduceOp::kAverage, DType::kC64, reduced.data(), 3,
                static_cast<std::int64_t>(count), {.factor = 0.5}, {.divisor = 3});
    std::vector<double> wide(parts.begin(), parts.end());
    ReduceParts(ReduceOp::kSum, DType::kC128, wide.data(), 3, static_cast<std::int64_t>(count), {},
                {});
    for (std::size_t i = 0; i < 2 * count; ++i) {
      const float a = parts[i];
      const float b = parts[2 * count + i];
      const float c = parts[4 * count + i];
      ASSERT_EQ(reduced[i], (a * 0.5f + b * 0.5f + c * 0.5f) / 3.0f);
      ASSERT_EQ(wide[i], static_cast<double>(a) + b + c);
    }
  }
}

TEST_P(ReducePartsTest, IntegersTruncateBehindEachFactor) {
  std::int32_t numbers[] = {3, -3, 5, -5};
  ReduceParts(ReduceOp::kSum, DType::kI32, numbers, 2, 2, {.factor = 0.5}, {.factor = 1.5});
  EXPECT_EQ(numbers[0], 4);  // (1 + 2) * 1.5
  EXPECT_EQ(numbers[1], -4);
  std::uint8_t bytes[] = {200, 7, 200, 1};  // each stops at 255, and at 0
  ReduceParts(ReduceOp::kAverage, DType::kU8, bytes, 2, 2, {.factor = 1.5}, {.divisor = 2});
  EXPECT_EQ(bytes[0], 255);
  EXPECT_EQ(bytes[1], 5);
  ReduceParts(ReduceOp::kAverage, DType::kU8, bytes, 2, 1, {.factor = -2}, {.divisor = 2});
  EXPECT_EQ(bytes[0], 0);
}

TEST(ReducePartsDeathTest, BoolTakesNoScale) {
  std::uint8_t bytes[2] = {};
  EXPECT_DEATH(ReduceParts(ReduceOp::kMax, DType::kBool, bytes, 2, 1, {.divisor = 2}, {}),
               "scaled");
}

}  // namespace
}  // namespace sirtaki::ops
