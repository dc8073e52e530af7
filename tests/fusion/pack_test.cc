#include "fusion/pack.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/support/half_reference.h"
#include "tests/support/test_scale.h"

namespace sirtaki::fusion {
namespace {

using core::DType;

std::vector<Piece> Shapes(const std::vector<std::int64_t>& counts) {
  std::vector<Piece> pieces;
  pieces.reserve(counts.size());
  for (const std::int64_t count : counts) pieces.push_back({.count = count});
  return pieces;
}

// Windows follow each other without gaps, are as large as allowed, and direct ones cut no other
// tensor.
void ExpectGoodWindows(const FusedVector& vector, std::int64_t element, const Cutting& cutting) {
  std::int64_t next = 0;
  for (const Window& window : vector.windows()) {
    EXPECT_EQ(window.begin, next);
    EXPECT_GT(window.count, 0);
    EXPECT_LE(window.count * element, std::max(cutting.chunk_bytes, std::int64_t{64}));
    EXPECT_LE(window.count * element, vector.staging_bytes());
    next += window.count;
  }
  EXPECT_EQ(next, vector.count());
}

TEST(FusedVectorTest, NothingHasNoWindows) {
  for (const auto& counts : {std::vector<std::int64_t>{}, {0}, {0, 0, 0}}) {
    const FusedVector vector(DType::kF32, DType::kF32, Shapes(counts), {});
    EXPECT_TRUE(vector.windows().empty());
    EXPECT_EQ(vector.count(), 0);
    EXPECT_EQ(vector.staging_bytes(), 0);
  }
}

TEST(FusedVectorTest, SmallTensorsArePackedTogether) {
  const Cutting cutting{.chunk_bytes = 1024, .direct_bytes = 1024};
  const FusedVector vector(DType::kF32, DType::kF32, Shapes({10, 20, 30, 40}), cutting);
  ASSERT_EQ(vector.windows().size(), 1u);
  EXPECT_EQ(vector.windows()[0].count, 100);
  EXPECT_FALSE(vector.windows()[0].direct);
}

TEST(FusedVectorTest, LargeTensorsAreCutByThemselvesAfterTheSmallOnes) {
  const Cutting cutting{.chunk_bytes = 1024, .direct_bytes = 1024};
  const FusedVector vector(DType::kF32, DType::kF32, Shapes({10, 600, 20, 256, 30}), cutting);
  ASSERT_EQ(vector.windows().size(), 5u);  // 60 small ones; 600 in three; 256
  EXPECT_EQ(vector.windows()[0].count, 60);
  EXPECT_FALSE(vector.windows()[0].direct);
  EXPECT_EQ(vector.windows()[1].count, 208);  // even shares, in whole cache lines
  EXPECT_EQ(vector.windows()[3].count, 184);
  EXPECT_EQ(vector.windows()[4].count, 256);
  for (std::size_t i = 1; i < 5; ++i) EXPECT_TRUE(vector.windows()[i].direct);
  ExpectGoodWindows(vector, 4, cutting);
}

TEST(FusedVectorTest, WidenedTensorsAreNeverDirect) {
  const Cutting cutting{.chunk_bytes = 1024, .direct_bytes = 1024};
  const FusedVector vector(DType::kF16, DType::kF32, Shapes({4000, 10}), cutting);
  EXPECT_EQ(vector.windows().size(), 16u);
  for (const Window& window : vector.windows()) EXPECT_FALSE(window.direct);
  ExpectGoodWindows(vector, 4, cutting);
}

TEST(FusedVectorTest, VectorsBeyond32BitsAreCut) {
  const std::int64_t count = (std::int64_t{1} << 33) + 5;
  const Cutting cutting{.chunk_bytes = std::int64_t{1} << 30, .direct_bytes = 1 << 20};
  const FusedVector vector(DType::kF64, DType::kF64, Shapes({3, count}), cutting);
  EXPECT_EQ(vector.count(), count + 3);
  ExpectGoodWindows(vector, 8, cutting);
  const Cutting whole{.chunk_bytes = std::numeric_limits<std::int64_t>::max()};
  const FusedVector one(DType::kU8, DType::kU8, Shapes({3, count}), whole);
  ASSERT_EQ(one.windows().size(), 1u);
  EXPECT_EQ(one.windows()[0].count, count + 3);
}

TEST(FusedVectorTest, TinyChunksStillMoveWholeLines) {
  const Cutting cutting{.chunk_bytes = 1, .direct_bytes = 1};
  const FusedVector vector(DType::kI64, DType::kI64, Shapes({20, 3}), cutting);
  ExpectGoodWindows(vector, 8, cutting);
  EXPECT_EQ(vector.windows().size(), 4u);
}

TEST(FusedVectorTest, ADirectWindowMovesInTheOutput) {
  std::vector<float> in(64, 3.0f);
  std::vector<float> out(64, 0.0f);
  float staging[64];
  const Cutting cutting{.chunk_bytes = 128, .direct_bytes = 128};
  const FusedVector vector(DType::kF32, DType::kF32,
                           {{.input = in.data(), .output = out.data(), .count = 64}}, cutting);
  ASSERT_EQ(vector.windows().size(), 2u);
  const Window& second = vector.windows()[1];
  EXPECT_EQ(vector.Load(second, staging, {.factor = 2.0}), out.data() + 32);
  EXPECT_EQ(out[31], 0.0f);
  EXPECT_EQ(out[32], 6.0f);
  vector.Store(second, staging, {.divisor = 3});
  EXPECT_EQ(out[63], 2.0f);
  EXPECT_EQ(in[32], 3.0f);
}

TEST(FusedVectorTest, ADirectWindowWithoutOutputMovesInStaging) {
  std::vector<float> in(64, 3.0f);
  float staging[64] = {};
  const Cutting cutting{.chunk_bytes = 256, .direct_bytes = 256};
  const FusedVector vector(DType::kF32, DType::kF32, {{.input = in.data(), .count = 64}}, cutting);
  EXPECT_TRUE(vector.windows()[0].direct);
  EXPECT_EQ(vector.Load(vector.windows()[0], staging), staging);
  EXPECT_EQ(staging[63], 3.0f);
  vector.Store(vector.windows()[0], staging);  // goes nowhere
}

TEST(FusedVectorTest, WithoutInputZerosAreLoaded) {
  std::vector<float> out(16, 9.0f);
  std::vector<float> large(64, 9.0f);
  float staging[64];
  std::memset(staging, 0x7f, sizeof(staging));
  const Cutting cutting{.chunk_bytes = 256, .direct_bytes = 256};
  const FusedVector vector(
      DType::kF32, DType::kF32,
      {{.output = out.data(), .count = 16}, {.output = large.data(), .count = 64}}, cutting);
  ASSERT_EQ(vector.windows().size(), 2u);
  vector.Load(vector.windows()[0], staging, {.factor = 2.0});
  EXPECT_EQ(staging[15], 0.0f);
  EXPECT_EQ(out[0], 9.0f);
  vector.Load(vector.windows()[1], staging, {.factor = 2.0});
  EXPECT_EQ(large[63], 0.0f);
}

TEST(FusedVectorTest, WithoutInputTheIdentityIsLoaded) {
  Identity identity;
  const float infinity = std::numeric_limits<float>::infinity();
  std::memcpy(identity.bytes.data(), &infinity, sizeof(infinity));
  // More than is filled at once.
  std::vector<float> in(3, 7.0f);
  const FusedVector vector(DType::kF32, DType::kF32,
                           {{.count = 5000}, {.input = in.data(), .count = 3}, {.count = 1}},
                           {.chunk_bytes = std::int64_t{1} << 20}, identity);
  std::vector<float> staging(5004, 0.0f);
  ASSERT_EQ(vector.windows().size(), 1u);
  vector.Load(vector.windows()[0], staging.data(), {.factor = -1.0});
  for (std::size_t i = 0; i < 5000; ++i) ASSERT_EQ(staging[i], infinity) << i;
  EXPECT_EQ(staging[5000], -7.0f);
  EXPECT_EQ(staging[5003], infinity);
}

TEST(FusedVectorTest, OnlyADirectWindowWithInputHasASource) {
  std::vector<float> in(64, 3.0f);
  const Cutting cutting{.chunk_bytes = 128, .direct_bytes = 128};
  const FusedVector vector(
      DType::kF32, DType::kF32,
      {{.input = in.data(), .count = 64}, {.input = in.data(), .count = 3}, {.count = 32}},
      cutting);
  ASSERT_EQ(vector.windows().size(), 4u);
  EXPECT_EQ(vector.Source(vector.windows()[0]), nullptr);  // small
  EXPECT_EQ(vector.Source(vector.windows()[1]), in.data());
  EXPECT_EQ(vector.Source(vector.windows()[2]), in.data() + 32);
  EXPECT_EQ(vector.Source(vector.windows()[3]), nullptr);  // absent
}

TEST(FusedVectorTest, CopiesFollowEachOtherInTheOutput) {
  std::vector<float> first(6, 0.0f);
  std::vector<float> second(4, 0.0f);
  const FusedVector vector(
      DType::kF32, DType::kF32,
      {{.output = first.data(), .count = 3}, {.count = 1}, {.output = second.data(), .count = 2}},
      {});
  const std::vector<float> staged = {1, 2, 3, 4, 5, 6};
  vector.StoreFrom(vector.windows()[0], staged.data(), {.factor = 2.0}, 1);
  EXPECT_EQ(first, (std::vector<float>{0, 0, 0, 2, 4, 6}));
  EXPECT_EQ(second, (std::vector<float>{0, 0, 10, 12}));
}

// Loading and storing every window gives what a loop over the elements gives, whatever the cuts.
void ExpectLikeNaiveLoop(std::mt19937_64& random) {
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
  const bool half = below(2) == 0;
  const DType dtype = half ? DType::kF16 : DType::kF32;
  const Scale before{.factor = 0.75};
  const Scale after{.factor = 1.0, .divisor = 3};
  const Cutting cutting{.chunk_bytes = 64 + below(1000), .direct_bytes = 1 + below(2000)};

  std::vector<std::vector<std::uint16_t>> halves;
  std::vector<std::vector<float>> floats;
  std::vector<std::vector<std::uint16_t>> half_results;
  std::vector<std::vector<float>> float_results;
  std::vector<Piece> pieces;
  const std::int64_t tensors = 1 + below(12);
  for (std::int64_t t = 0; t < tensors; ++t) {
    const auto count = static_cast<std::size_t>(below(3) == 0 ? below(4) : below(700));
    halves.emplace_back(count);
    floats.emplace_back(count);
    half_results.emplace_back(count, std::uint16_t{0xffff});
    float_results.emplace_back(count, -1.0f);
    for (std::size_t i = 0; i < count; ++i) {
      floats.back()[i] = static_cast<float>(below(2000) - 1000) / 8;
      halves.back()[i] = tests::kFloat16.Encode(floats.back()[i]);
    }
    Piece piece{.count = static_cast<std::int64_t>(count)};
    if (half) {
      piece.input = halves.back().data();
      piece.output = half_results.back().data();
    } else {
      piece.input = floats.back().data();
      piece.output = float_results.back().data();
    }
    pieces.push_back(piece);
  }

  const FusedVector vector(dtype, DType::kF32, pieces, cutting);
  ExpectGoodWindows(vector, 4, cutting);
  std::vector<float> staging(static_cast<std::size_t>(vector.staging_bytes()) / 4);
  for (const Window& window : vector.windows()) {
    auto* memory = static_cast<float*>(vector.Load(window, staging.data(), before));
    for (std::int64_t i = 0; i < window.count; ++i) memory[i] += 1.0f;
    vector.Store(window, staging.data(), after);
  }
  for (std::size_t t = 0; t < floats.size(); ++t) {
    for (std::size_t i = 0; i < floats[t].size(); ++i) {
      const float expected = (floats[t][i] * 0.75f + 1.0f) / 3.0f;
      if (half) {
        EXPECT_EQ(half_results[t][i], tests::kFloat16.Encode(expected));
      } else {
        EXPECT_EQ(float_results[t][i], expected);
      }
    }
  }
}

TEST(FusedVectorTest, RandomGroupsAreLoadedAndStoredWhole) {
  std::mt19937_64 random(tests::TestSeed());
  const int rounds = tests::ScaledCount(300, 10000);
  for (int i = 0; i < rounds && !::testing::Test::HasFailure(); ++i) ExpectLikeNaiveLoop(random);
}

}  // namespace
}  // namespace sirtaki::fusion
