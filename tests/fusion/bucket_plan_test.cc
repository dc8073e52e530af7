#include "fusion/bucket_plan.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "core/protocol/request.h"
#include "core/protocol/wire.h"

namespace sirtaki::fusion {
namespace {

using core::DType;
using Buckets = std::vector<std::vector<std::size_t>>;

// A gradient of that many bytes, in elements of the type.
core::Signature Gradient(std::int64_t bytes, DType dtype = DType::kF32,
                         core::DeviceKind device = core::DeviceKind::kHost,
                         std::uint32_t slot = 0) {
  return {.dtype = dtype,
          .device = device,
          .slot = slot,
          .shape = {bytes / static_cast<std::int64_t>(core::SizeOf(dtype))}};
}

std::vector<core::Signature> Floats(const std::vector<std::int64_t>& bytes) {
  std::vector<core::Signature> gradients;
  for (const std::int64_t b : bytes) gradients.push_back(Gradient(b));
  return gradients;
}

TEST(BucketPlanTest, TheFirstBucketIsSmaller) {
  EXPECT_EQ(PlanBuckets(Floats({4, 4, 4, 4, 4, 4}), {.first = 8, .others = 12}),
            (Buckets{{0, 1}, {2, 3, 4}, {5}}));
}

TEST(BucketPlanTest, WhatDoesNotFitBeginsABucket) {
  EXPECT_EQ(PlanBuckets(Floats({24, 24, 24}), {.first = 40, .others = 40}),
            (Buckets{{0}, {1}, {2}}));
  EXPECT_EQ(PlanBuckets(Floats({24, 16, 24}), {.first = 40, .others = 40}), (Buckets{{0, 1}, {2}}));
}

TEST(BucketPlanTest, ALargeOneTakesLittleOnesAlong) {
  EXPECT_EQ(PlanBuckets(Floats({4, 400, 4, 400}), {.first = 16, .others = 40}),
            (Buckets{{0, 1}, {2, 3}}));
}

TEST(BucketPlanTest, EachTypeHasItsOwn) {
  const std::vector<core::Signature> gradients = {
      Gradient(8), Gradient(8, DType::kF64), Gradient(8), Gradient(8, DType::kF64), Gradient(8)};
  // In the order in which they are complete.
  EXPECT_EQ(PlanBuckets(gradients, {.first = 100, .others = 16}), (Buckets{{1, 3}, {0, 2, 4}}));
}

TEST(BucketPlanTest, EachDeviceHasItsOwn) {
  const auto cuda = core::DeviceKind::kCuda;
  const std::vector<core::Signature> gradients = {Gradient(4),
                                                  Gradient(4, DType::kF32, cuda, 0),
                                                  Gradient(4, DType::kF32, cuda, 1),
                                                  Gradient(4, DType::kF32, cuda, 0),
                                                  Gradient(4),
                                                  Gradient(4, DType::kF32, cuda, 1)};
  EXPECT_EQ(PlanBuckets(gradients, {.first = 100, .others = 100}),
            (Buckets{{1, 3}, {0, 4}, {2, 5}}));
}

TEST(BucketPlanTest, NothingMakesNothing) {
  EXPECT_TRUE(PlanBuckets({}, {.first = 1, .others = 1}).empty());
  EXPECT_EQ(PlanBuckets(Floats({0, 0}), {.first = 1, .others = 1}), (Buckets{{0, 1}}));
}

TEST(BucketPlanTest, NoMoreThanAMessageHolds) {
  const auto buckets =
      PlanBuckets(Floats(std::vector<std::int64_t>(core::kMaxParts + 1, 4)),
                  {.first = std::int64_t{1} << 30, .others = std::int64_t{1} << 30});
  ASSERT_EQ(buckets.size(), 2u);
  EXPECT_EQ(buckets[0].size(), core::kMaxParts);
}

TEST(BucketPlanTest, HoldsEachGradientOnceAndOneTypeABucket) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    std::vector<core::Signature> gradients(random() % 60);
    for (auto& gradient : gradients) {
      gradient = Gradient(8 * static_cast<std::int64_t>(random() % 5),
                          random() % 3 == 0 ? DType::kF64 : DType::kF32);
    }
    const BucketSizes sizes{static_cast<std::int64_t>(1 + random() % 50),
                            static_cast<std::int64_t>(1 + random() % 50)};
    std::vector<int> seen(gradients.size());
    std::size_t last = 0;
    for (const auto& bucket : PlanBuckets(gradients, sizes)) {
      ASSERT_FALSE(bucket.empty());
      EXPECT_GE(bucket.back(), last) << "in the order in which they are complete, seed " << seed;
      last = bucket.back();
      for (std::size_t i = 0; i < bucket.size(); ++i) {
        ++seen[bucket[i]];
        EXPECT_EQ(gradients[bucket[i]].dtype, gradients[bucket[0]].dtype) << "seed " << seed;
        if (i > 0) {
          EXPECT_LT(bucket[i - 1], bucket[i]) << "seed " << seed;
        }
      }
    }
    EXPECT_EQ(seen, std::vector<int>(gradients.size(), 1)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace sirtaki::fusion
