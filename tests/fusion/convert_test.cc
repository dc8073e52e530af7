#include "fusion/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "tests/support/each_target.h"
#include "tests/support/half_reference.h"
#include "tests/support/test_scale.h"

namespace sirtaki::fusion {
namespace {

using core::DType;
using tests::kBFloat16;
using tests::kFloat16;
using tests::SmallFloat;
using tests::UseTarget;

class ConvertTest : public tests::EachTargetTest {};
INSTANTIATE_TEST_SUITE_P(Targets, ConvertTest, tests::Targets(), tests::TargetOf);

std::vector<std::uint16_t> EveryHalf() {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  return all;
}

void ExpectExactWidening(DType dtype, const SmallFloat& format) {
  const std::vector<std::uint16_t> halves = EveryHalf();
  std::vector<float> floats(halves.size());
  Convert(dtype, halves.data(), DType::kF32, floats.data(), 65536);
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const double expected = format.Decode(halves[i]);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(floats[i])) << std::hex << i;
    } else {
      EXPECT_EQ(floats[i], expected) << std::hex << i;
      EXPECT_EQ(std::signbit(floats[i]), std::signbit(expected)) << std::hex << i;
    }
  }
}

TEST_P(ConvertTest, HalvesAreWidenedExactly) {
  ExpectExactWidening(DType::kF16, kFloat16);
  ExpectExactWidening(DType::kBF16, kBFloat16);
}

// Every half, the middles between neighbours, what lies just beside those, and random bits.
std::vector<float> FloatsWorthRounding(const SmallFloat& format) {
  std::vector<float> floats = {0.0f,
                               -0.0f,
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::denorm_min(),
                               65504.0f,
                               65519.996f,
                               65520.0f};
  for (int bits = 0; bits < 0x8000; ++bits) {
    const double low = format.Decode(static_cast<std::uint16_t>(bits));
    const double high = format.Decode(static_cast<std::uint16_t>(bits + 1));
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const auto middle = static_cast<float>((low + high) / 2);
    for (const float f : {static_cast<float>(low), middle, std::nextafter(middle, 0.0f),
                          std::nextafter(middle, std::numeric_limits<float>::max())}) {
      floats.push_back(f);
      floats.push_back(-f);
    }
  }
  std::mt19937_64 random(tests::TestSeed());
  for (int i = 0; i < 100000; ++i) {
    const auto f = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (!std::isnan(f)) floats.push_back(f);
  }
  return floats;
}

void ExpectNearestEven(DType dtype, const SmallFloat& format) {
  const std::vector<float> floats = FloatsWorthRounding(format);
  std::vector<std::uint16_t> halves(floats.size());
  Convert(DType::kF32, floats.data(), dtype, halves.data(),
          static_cast<std::int64_t>(floats.size()));
  int wrong = 0;
  for (std::size_t i = 0; i < floats.size(); ++i) {
    if (halves[i] == format.Encode(floats[i])) continue;
    ++wrong;
    if (wrong < 10) ADD_FAILURE() << floats[i] << " became " << std::hex << halves[i];
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(ConvertTest, HalvesAreRoundedToNearestEven) {
  ExpectNearestEven(DType::kF16, kFloat16);
  ExpectNearestEven(DType::kBF16, kBFloat16);
}

TEST_P(ConvertTest, NanStaysNan) {
  std::vector<float> nans;
  for (const std::uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0x7fffffffu, 0xffffffffu,
                                   0x7f801000u, 0x7fbfffffu, 0xff8fffffu}) {
    nans.push_back(std::bit_cast<float>(bits));
  }
  std::vector<std::uint16_t> halves(nans.size());
  const auto count = static_cast<std::int64_t>(nans.size());
  Convert(DType::kF32, nans.data(), DType::kF16, halves.data(), count);
  for (const std::uint16_t half : halves) EXPECT_TRUE(std::isnan(kFloat16.Decode(half)));
  Convert(DType::kF32, nans.data(), DType::kBF16, halves.data(), count);
  for (const std::uint16_t half : halves) EXPECT_TRUE(std::isnan(kBFloat16.Decode(half)));
}

TEST(ConvertTargetsTest, EveryProcessorGivesTheSameBits) {
  const std::vector<std::uint16_t> halves = EveryHalf();
  const std::vector<float> floats = FloatsWorthRounding(kFloat16);
  for (const DType half : {DType::kF16, DType::kBF16}) {
    std::vector<std::vector<std::uint32_t>> widened;
    std::vector<std::vector<std::uint16_t>> rounded;
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
      UseTarget(target);
      Convert(half, halves.data(), DType::kF32, widened.emplace_back(halves.size()).data(), 65536);
      Convert(DType::kF32, floats.data(), half, rounded.emplace_back(floats.size()).data(),
              static_cast<std::int64_t>(floats.size()));
    }
    UseTarget(0);
    EXPECT_THAT(widened, ::testing::Each(::testing::Eq(std::cref(widened.front()))));
    EXPECT_THAT(rounded, ::testing::Each(::testing::Eq(std::cref(rounded.front()))));
  }
}

// More than a vector of any processor, and not a whole number of them; nothing is written beyond.
template <typename From, typename To>
void ExpectEveryLengthIsWhole(DType from, From one, DType to, To expected) {
  for (std::int64_t n = 0; n < 150; ++n) {
    const std::vector<From> in(static_cast<std::size_t>(n), one);
    std::vector<To> out(static_cast<std::size_t>(n) + 1, To{77});
    Convert(from, in.data(), to, out.data(), n);
    EXPECT_EQ(out.back(), To{77}) << n;
    out.pop_back();
    EXPECT_THAT(out, ::testing::Each(expected)) << n;
  }
}

TEST_P(ConvertTest, EveryLengthIsWhole) {
  constexpr std::uint16_t kOneF16 = 0x3c00;
  constexpr std::uint16_t kOneBF16 = 0x3f80;
  ExpectEveryLengthIsWhole(DType::kF16, kOneF16, DType::kF32, 1.0f);
  ExpectEveryLengthIsWhole(DType::kBF16, kOneBF16, DType::kF32, 1.0f);
  ExpectEveryLengthIsWhole(DType::kF16, kOneF16, DType::kF64, 1.0);
  ExpectEveryLengthIsWhole(DType::kBF16, kOneBF16, DType::kF64, 1.0);
  ExpectEveryLengthIsWhole(DType::kF32, 1.0f, DType::kF16, kOneF16);
  ExpectEveryLengthIsWhole(DType::kF32, 1.0f, DType::kBF16, kOneBF16);
  ExpectEveryLengthIsWhole(DType::kF64, 1.0, DType::kF16, kOneF16);
  ExpectEveryLengthIsWhole(DType::kF64, 1.0, DType::kBF16, kOneBF16);
  ExpectEveryLengthIsWhole(DType::kF32, 1.0f, DType::kF64, 1.0);
  ExpectEveryLengthIsWhole(DType::kF64, 1.0, DType::kF32, 1.0f);
  ExpectEveryLengthIsWhole(DType::kI32, std::int32_t{-5}, DType::kI64, std::int64_t{-5});
}

TEST_P(ConvertTest, WhatFloatCannotHoldIsInfinite) {
  const double in[] = {1e300, -1e300, 1e-300, std::numeric_limits<double>::quiet_NaN()};
  float out[4];
  Convert(DType::kF64, in, DType::kF32, out, 4);
  EXPECT_EQ(out[0], std::numeric_limits<float>::infinity());
  EXPECT_EQ(out[1], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(out[2], 0.0f);
  EXPECT_TRUE(std::isnan(out[3]));
}

TEST_P(ConvertTest, FloatsAreScaledInTheirOwnPrecision) {
  const std::vector<float> in = {1.0f, -3.0f, 0.1f, 1e30f};
  std::vector<float> out(4);
  Convert(DType::kF32, in.data(), DType::kF32, out.data(), 4, {.factor = 0.1});
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(out[i], in[i] * 0.1f);
  const std::vector<double> wide = {1.0, -3.0, 0.1};
  std::vector<double> result(3);
  Convert(DType::kF64, wide.data(), DType::kF64, result.data(), 3, {.factor = 0.1});
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(result[i], wide[i] * 0.1);
}

TEST_P(ConvertTest, AnAverageIsTheSumDividedNotMultiplied) {
  std::vector<float> values;
  values.reserve(1000);
  for (int i = 0; i < 1000; ++i) values.push_back(static_cast<float>(i) * 0.37f);
  for (const std::int64_t n : {1, 2, 3, 5, 7, 8}) {
    std::vector<float> out = values;
    Convert(DType::kF32, out.data(), DType::kF32, out.data(), 1000, {.divisor = n});
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(out[i], values[i] / static_cast<float>(n));
    }
  }
}

TEST_P(ConvertTest, IntegersAreDividedTowardZero) {
  const std::vector<std::int8_t> in = {7, -7, 127, -128, 1, -1, 0};
  std::vector<std::int8_t> out(in.size());
  Convert(DType::kI8, in.data(), DType::kI8, out.data(), 7, {.divisor = 2});
  EXPECT_EQ(out, (std::vector<std::int8_t>{3, -3, 63, -64, 0, 0, 0}));
  Convert(DType::kI8, in.data(), DType::kI8, out.data(), 7, {.divisor = 300});
  EXPECT_EQ(out, (std::vector<std::int8_t>(7, 0)));
  const std::uint8_t big = 255;
  std::uint8_t third = 0;
  Convert(DType::kU8, &big, DType::kU8, &third, 1, {.divisor = 2});
  EXPECT_EQ(third, 127);
  const std::int64_t least = std::numeric_limits<std::int64_t>::min();
  std::int64_t half = 0;
  Convert(DType::kI64, &least, DType::kI64, &half, 1, {.divisor = 2});
  EXPECT_EQ(half, least / 2);
}

TEST_P(ConvertTest, IntegersAreMultipliedInDoubleAndTruncated) {
  const std::vector<std::int8_t> in = {7, -7, 127, -128, 1, -1, 0};
  std::vector<std::int8_t> out(in.size());
  Convert(DType::kI8, in.data(), DType::kI8, out.data(), 7, {.factor = 0.5});
  EXPECT_EQ(out, (std::vector<std::int8_t>{3, -3, 63, -64, 0, 0, 0}));
  Convert(DType::kI8, in.data(), DType::kI8, out.data(), 7, {.factor = -2.5, .divisor = 2});
  EXPECT_EQ(out, (std::vector<std::int8_t>{-8, 8, -128, 127, -1, 1, 0}));
  const std::int32_t sums[] = {-381, -2, 381};
  std::int8_t averages[3];
  Convert(DType::kI32, sums, DType::kI8, averages, 3, {.factor = 0.5, .divisor = 3});
  EXPECT_THAT(averages, ::testing::ElementsAre(-63, 0, 63));
  // What no integer of the type is becomes the nearest that is.
  const std::int64_t ends[] = {std::numeric_limits<std::int64_t>::max(),
                               std::numeric_limits<std::int64_t>::min()};
  std::int64_t far[2];
  Convert(DType::kI64, ends, DType::kI64, far, 2, {.factor = 1.5});
  EXPECT_THAT(far, ::testing::ElementsAreArray(ends));
  Convert(DType::kI64, ends, DType::kI64, far, 2, {.factor = 1e308});
  EXPECT_THAT(far, ::testing::ElementsAreArray(ends));
  const std::int8_t big = 100;
  std::int32_t wide = 0;  // the tensor's type is the narrower one
  Convert(DType::kI8, &big, DType::kI32, &wide, 1, {.factor = 1.5});
  EXPECT_EQ(wide, 127);
  std::uint8_t byte = 100;
  Convert(DType::kU8, &byte, DType::kU8, &byte, 1, {.factor = 2.56});
  EXPECT_EQ(byte, 255);
  Convert(DType::kU8, &byte, DType::kU8, &byte, 1, {.factor = -1});
  EXPECT_EQ(byte, 0);
}

TEST_P(ConvertTest, HalvesAreScaledInFloatAndRoundedOnce) {
  // More than a block, and not a whole number of them.
  constexpr std::size_t kCount = 5003;
  std::mt19937_64 random(tests::TestSeed());
  std::uniform_real_distribution<float> distribution(-100.0f, 100.0f);
  std::vector<float> sums(kCount);
  for (float& f : sums) f = distribution(random);
  for (const auto& [dtype, format] :
       {std::pair{DType::kF16, kFloat16}, {DType::kBF16, kBFloat16}}) {
    std::vector<std::uint16_t> halves(kCount);
    Convert(DType::kF32, sums.data(), dtype, halves.data(), kCount, {.factor = 0.3, .divisor = 3});
    const auto factor = static_cast<float>(0.3 / 3);
    for (std::size_t i = 0; i < kCount; ++i) EXPECT_EQ(halves[i], format.Encode(sums[i] * factor));

    std::vector<float> floats(kCount);
    Convert(dtype, halves.data(), DType::kF32, floats.data(), kCount, {.factor = 0.7});
    for (std::size_t i = 0; i < kCount; ++i) {
      EXPECT_EQ(floats[i], static_cast<float>(format.Decode(halves[i])) * 0.7f);
    }
  }
}

TEST_P(ConvertTest, DoublesBecomeHalvesByWayOfFloat) {
  constexpr std::size_t kCount = 5003;
  std::mt19937_64 random(tests::TestSeed());
  std::uniform_real_distribution<double> distribution(-100.0, 100.0);
  std::vector<double> in(kCount);
  for (double& d : in) d = distribution(random);
  for (const auto& [dtype, format] :
       {std::pair{DType::kF16, kFloat16}, {DType::kBF16, kBFloat16}}) {
    for (const double factor : {1.0, 0.3}) {
      std::vector<std::uint16_t> halves(kCount);
      Convert(DType::kF64, in.data(), dtype, halves.data(), kCount, {.factor = factor});
      for (std::size_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(halves[i], format.Encode(static_cast<float>(in[i] * factor)));
      }
      std::vector<double> back(kCount);
      Convert(dtype, halves.data(), DType::kF64, back.data(), kCount, {.factor = factor});
      for (std::size_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(back[i], format.Decode(halves[i]) * factor);
      }
    }
  }
}

TEST_P(ConvertTest, BetweenFloatAndDoubleTheScaleIsComputedInDouble) {
  std::vector<double> in(3000);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = 1.0 / static_cast<double>(i + 1);
  in[0] = 1e300;  // fits only when it has been scaled
  std::vector<float> narrow(in.size());
  Convert(DType::kF64, in.data(), DType::kF32, narrow.data(), 3000, {.factor = 1e-290});
  for (std::size_t i = 0; i < in.size(); ++i) {
    EXPECT_EQ(narrow[i], static_cast<float>(in[i] * 1e-290));
  }
  EXPECT_EQ(narrow[0], 1e10f);
  std::vector<double> wide(in.size());
  Convert(DType::kF32, narrow.data(), DType::kF64, wide.data(), 3000, {.factor = 0.1});
  for (std::size_t i = 0; i < in.size(); ++i) {
    EXPECT_EQ(wide[i], static_cast<double>(narrow[i]) * 0.1);
  }
}

TEST_P(ConvertTest, RoundThroughLeavesWhatAHalfCanHold) {
  std::vector<float> values(5003);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.37f - 900;
  for (const auto& [dtype, format] :
       {std::pair{DType::kF16, kFloat16}, {DType::kBF16, kBFloat16}}) {
    std::vector<float> rounded = values;
    RoundThrough(dtype, rounded.data(), 5003, {.divisor = 3});
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(rounded[i], format.Decode(format.Encode(values[i] / 3.0f)));
    }
  }
}

TEST_P(ConvertTest, WithoutScaleBytesAreCopied) {
  for (int d = 0; d < core::kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    const std::size_t bytes = 13 * core::SizeOf(dtype);
    std::vector<std::uint8_t> in(bytes);
    for (std::size_t i = 0; i < bytes; ++i) in[i] = static_cast<std::uint8_t>(i * 37 + 1);
    std::vector<std::uint8_t> out(bytes);
    Convert(dtype, in.data(), dtype, out.data(), 13);
    EXPECT_EQ(out, in);
    Convert(dtype, in.data(), dtype, in.data(), 13);
    EXPECT_EQ(out, in);
  }
}

TEST_P(ConvertTest, NarrowIntegersAreAveragedInAWiderType) {
  EXPECT_EQ(AccumulationType(DType::kU8, core::ReduceOp::kAverage), DType::kI32);
  EXPECT_EQ(AccumulationType(DType::kI32, core::ReduceOp::kAverage), DType::kI64);
  EXPECT_EQ(AccumulationType(DType::kI64, core::ReduceOp::kAverage), DType::kI64);
  EXPECT_EQ(AccumulationType(DType::kI8), DType::kI8);
  const std::int8_t narrow[] = {-128, -1, 127};
  std::int32_t wide[3];
  Convert(DType::kI8, narrow, DType::kI32, wide, 3);
  EXPECT_THAT(wide, ::testing::ElementsAre(-128, -1, 127));
  const std::int32_t sums[] = {-381, -2, 381};
  std::int8_t averages[3];
  Convert(DType::kI32, sums, DType::kI8, averages, 3, {.divisor = 3});
  EXPECT_THAT(averages, ::testing::ElementsAre(-127, 0, 127));
}

TEST(ConvertDeathTest, WhatHasNoMeaningIsABug) {
  std::uint16_t half = 0;
  std::int32_t number = 0;
  EXPECT_DEATH(Convert(DType::kF16, &half, DType::kF16, &half, 1, {.factor = 2}), "are converted");
  EXPECT_DEATH(Convert(DType::kI8, &number, DType::kF32, &number, 1), "are converted");
  EXPECT_DEATH(Convert(DType::kF16, &half, DType::kBF16, &half, 1), "are converted");
}

}  // namespace
}  // namespace sirtaki::fusion
