#include "ops/kernels.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "tests/support/half_reference.h"

namespace sirtaki::ops {
namespace {

using core::DType;

template <typename T>
void ExpectSums(DType dtype) {
  for (std::size_t count = 0; count < 70; ++count) {
    std::vector<T> to(count + 1);
    std::vector<T> from(count + 1);
    for (std::size_t i = 0; i <= count; ++i) {
      to[i] = static_cast<T>(i);
      from[i] = static_cast<T>(3 * i + 1);
    }
    AddInto(dtype, to.data(), from.data(), static_cast<std::int64_t>(count));
    for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(to[i], static_cast<T>(4 * i + 1));
    EXPECT_EQ(to[count], static_cast<T>(count)) << "beyond the end";
  }
}

TEST(KernelsTest, AddsEveryType) {
  ExpectSums<std::uint8_t>(DType::kU8);
  ExpectSums<std::int8_t>(DType::kI8);
  ExpectSums<std::int16_t>(DType::kI16);
  ExpectSums<std::int32_t>(DType::kI32);
  ExpectSums<std::int64_t>(DType::kI64);
  ExpectSums<float>(DType::kF32);
  ExpectSums<double>(DType::kF64);
}

template <typename T>
void ExpectWraps(DType dtype) {
  T to = std::numeric_limits<T>::max();
  const T one = 1;
  AddInto(dtype, &to, &one, 1);
  EXPECT_EQ(to, std::numeric_limits<T>::min());
}

TEST(KernelsTest, IntegersWrap) {
  ExpectWraps<std::uint8_t>(DType::kU8);
  ExpectWraps<std::int8_t>(DType::kI8);
  ExpectWraps<std::int16_t>(DType::kI16);
  ExpectWraps<std::int32_t>(DType::kI32);
  ExpectWraps<std::int64_t>(DType::kI64);
}

TEST(KernelsTest, SaysWhatItSums) {
  EXPECT_TRUE(HasSum(DType::kU8));
  EXPECT_TRUE(HasSum(DType::kF64));
  EXPECT_FALSE(HasSum(DType::kF16));
  EXPECT_FALSE(HasSum(DType::kBF16));
  EXPECT_FALSE(HasSum(DType::kBool));
}

TEST(KernelsTest, HalvesAreReducedInFloatAndRoundedOnce) {
  for (const auto& [dtype, format] :
       {std::pair{DType::kF16, tests::kFloat16}, {DType::kBF16, tests::kBFloat16}}) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5003}}) {
      for (const std::size_t members : {std::size_t{1}, std::size_t{3}}) {
        std::vector<std::uint16_t> parts(members * count);
        for (std::size_t i = 0; i < parts.size(); ++i) {
          parts[i] = format.Encode(static_cast<double>(i * 37 % 1001) / 16 - 30);
        }
        const std::vector<std::uint16_t> before = parts;
        ReduceHalf(dtype, parts.data(), static_cast<std::int64_t>(members),
                   static_cast<std::int64_t>(count), {.factor = 0.3}, {.divisor = 3});
        for (std::size_t i = 0; i < count; ++i) {
          float sum = 0;
          for (std::size_t m = 0; m < members; ++m) {
            const auto value = static_cast<float>(format.Decode(before[m * count + i])) * 0.3f;
            sum = m == 0 ? value : sum + value;
          }
          ASSERT_EQ(parts[i], format.Encode(sum / 3.0f)) << i;
        }
      }
    }
  }
}

TEST(KernelsDeathTest, ASumOfBoolIsABug) {
  bool a = true;
  const bool b = true;
  EXPECT_DEATH(AddInto(DType::kBool, &a, &b, 1), "no sum");
}

}  // namespace
}  // namespace sirtaki::ops
