#include "ops/groups/adasum.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ops/host/host_lanes.h"
#include "ops/inproc/inproc_backend.h"
#include "tests/support/rank_threads.h"
#include "tests/support/run_cases.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::ReduceOp;
using tests::RankThreads;
using Doubles = std::vector<double>;

template <typename T>
std::vector<T> Pair(const std::vector<T>& a, const std::vector<T>& b) {
  const DType dtype = sizeof(T) == 4 ? DType::kF32 : DType::kF64;
  const auto count = static_cast<std::int64_t>(a.size());
  std::vector<T> result(a.size());
  Combine(dtype, FactorsOf(ProductsOf(dtype, a.data(), b.data(), count)), a.data(), b.data(),
          result.data(), count);
  return result;
}

TEST(AdasumTest, OrthogonalGradientsAdd) {
  const std::vector<float> a = {3, 0, -1, 0, 2, 0, 0, 0, 0, 7};
  const std::vector<float> b = {0, 5, 0, 4, 0, 0, -8, 0, 1, 0};
  EXPECT_EQ(Pair(a, b), (std::vector<float>{3, 5, -1, 4, 2, 0, -8, 0, 1, 7}));
}

TEST(AdasumTest, EqualGradientsStayAsTheyAre) {
  const Doubles a = {1, -2, 0.1, 4, 5e-3, 6, -7, 8, 9};
  EXPECT_EQ(Pair(a, a), a);
}

// 1 - k/2 of the one and 1 - 1/2k of the other: (1 - k/2) + (k - 1/2) = (1 + k)/2.
TEST(AdasumTest, ParallelGradientsAreAveraged) {
  const Doubles a = {1, -2, 3, 4};
  const Doubles b = {3, -6, 9, 12};
  EXPECT_EQ(Pair(a, b), (Doubles{2, -4, 6, 8}));
}

TEST(AdasumTest, AZeroGradientLeavesTheOtherAsItIs) {
  const std::vector<float> zero(11, 0.0f);
  const std::vector<float> a = {1, -2, 3, 4, 0.1f, 6, 7, 8, 9, 10, -11};
  EXPECT_EQ(Pair(zero, a), a);
  EXPECT_EQ(Pair(a, zero), a);
  EXPECT_EQ(Pair(zero, zero), zero);
}

TEST(AdasumTest, ScalingByAPowerOfTwoScalesTheResult) {
  std::mt19937 random(5);
  std::vector<float> a(1000);
  std::vector<float> b(1000);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<float>(random() % 1000) / 7;
    b[i] = static_cast<float>(random() % 1000) / 9 - 40;
  }
  const std::vector<float> once = Pair(a, b);
  for (const float factor : {0x1p-40f, 0.25f, 0x1p60f}) {
    std::vector<float> scaled_a = a;
    std::vector<float> scaled_b = b;
    for (float& x : scaled_a) x *= factor;
    for (float& x : scaled_b) x *= factor;
    std::vector<float> expected = once;
    for (float& x : expected) x *= factor;
    EXPECT_EQ(Pair(scaled_a, scaled_b), expected);
  }
}

TEST(AdasumTest, ProductsArePlainSums) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  const std::vector<float> b = {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, -1};
  const AdasumProducts products = ProductsOf(DType::kF32, a.data(), b.data(), 11);
  EXPECT_EQ(products.dot, 2 * 55 - 11);
  EXPECT_EQ(products.a, 506);
  EXPECT_EQ(products.b, 41);
  const AdasumProducts twice = products + products;
  EXPECT_EQ(twice.dot, 198);
  EXPECT_EQ(twice.a, 1012);
  EXPECT_EQ(twice.b, 82);
}

// ---- through the lanes, against a recursion in double ----

Doubles ReferencePair(const Doubles& a, const Doubles& b) {
  double dot = 0;
  double a_square = 0;
  double b_square = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    dot += a[i] * b[i];
    a_square += a[i] * a[i];
    b_square += b[i] * b[i];
  }
  Doubles result(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    result[i] = (a_square == 0 ? 1 : 1 - dot / (2 * a_square)) * a[i] +
                (b_square == 0 ? 1 : 1 - dot / (2 * b_square)) * b[i];
  }
  return result;
}

Doubles ReferenceTree(const std::vector<Doubles>& gradients, std::size_t first, std::size_t count) {
  if (count == 1) return gradients[first];
  return ReferencePair(ReferenceTree(gradients, first, count / 2),
                       ReferenceTree(gradients, first + count / 2, count / 2));
}

Doubles Reference(std::vector<Doubles> gradients) {
  const std::size_t power = std::bit_floor(gradients.size());
  for (std::size_t i = power; i < gradients.size(); ++i) {
    gradients[i - power] = ReferencePair(gradients[i - power], gradients[i]);
  }
  return ReferenceTree(gradients, 0, power);
}

class AdasumLanesTest : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }

  // The result of each case; all ranks have the same bits.
  std::vector<Memory> Run(const std::vector<RunCase>& cases) const {
    std::vector<std::vector<Memory>> results(static_cast<std::size_t>(size()));
    InprocWorld world(size());
    RankThreads::Run(size(), [&](int rank) {
      const std::unique_ptr<Backend> backend = world.Connect(rank);
      HostLanesOptions options;
      options.rank = rank;
      HostLanes lanes(std::move(options), *backend);
      std::vector<RunSide> sides(cases.size());
      core::RunBatch batch = SmallBatch(size());
      batch.limits.fusion_bytes = 8192;
      batch.limits.small_bytes = 1024;
      for (std::size_t i = 0; i < cases.size(); ++i) {
        batch.items.push_back(sides[i].MakeItem(cases[i], std::to_string(i), rank, size()));
      }
      lanes.Start(std::move(batch), core::Clock::now());
      while (!lanes.Idle()) {
        if (!lanes.Step()) std::this_thread::yield();
      }
      for (std::size_t i = 0; i < cases.size(); ++i) {
        if (cases[i].Joined(rank)) {
          results[static_cast<std::size_t>(rank)].emplace_back();
          continue;
        }
        const core::Status& status = sides[i].handle()->status();
        EXPECT_TRUE(status.ok()) << status.ToString();
        Memory result = sides[i].result();
        result.resize(static_cast<std::size_t>(cases[i].signature.ElementCount()) *
                      core::SizeOf(cases[i].signature.dtype));
        results[static_cast<std::size_t>(rank)].push_back(std::move(result));
      }
    });
    for (int rank = 0; rank < size(); ++rank) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        if (cases[i].Joined(rank)) continue;
        EXPECT_TRUE(results[static_cast<std::size_t>(rank)][i] == results[0][i])
            << "other bits on rank " << rank << ": " << cases[i].ToString();
      }
    }
    return results[0];
  }

  void ExpectLikeReference(const std::vector<RunCase>& cases) const {
    const std::vector<Memory> results = Run(cases);
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const RunCase& c = cases[i];
      SCOPED_TRACE(c.ToString());
      const DType dtype = c.signature.dtype;
      std::vector<Doubles> gradients;
      double largest = 1;
      for (int r = 0; r < size(); ++r) {
        gradients.push_back(AsDoubles(dtype, InputOf(c, r)));
        for (double& x : gradients.back()) {
          x = r == c.absent || c.Joined(r) ? 0 : x * c.signature.prescale;
          largest = std::max(largest, std::fabs(x));
        }
      }
      const Doubles expected = Reference(std::move(gradients));
      const Doubles result = AsDoubles(dtype, results[i]);
      ASSERT_EQ(result.size(), expected.size());
      // What is computed in float32 is rounded at each level; half types once more, at the end.
      const double noise = (dtype == DType::kF64 ? 0x1p-51 : 0x1p-22) * largest * size();
      const double rounding = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0;
      for (std::size_t k = 0; k < expected.size(); ++k) {
        const double whole = expected[k] * c.signature.postscale;
        ASSERT_NEAR(result[k], whole,
                    rounding * std::fabs(whole) + noise * std::fabs(c.signature.postscale))
            << k;
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, AdasumLanesTest, ::testing::Range(1, 9));

// Tensors of all sizes share a buffer, and each has products of its own.
TEST_P(AdasumLanesTest, AgreesWithARecursionInDouble) {
  std::vector<RunCase> cases;
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (const std::int64_t count : {0, 1, 2, 5, 17, 64, 301, 3000, 3001}) {
      cases.push_back(
          {.signature = {.reduction = ReduceOp::kAdasum, .dtype = dtype, .shape = {count}},
           .in_place = count % 2 == 1,
           .seed = 900 + cases.size()});
    }
    cases.push_back(cases.back());
    cases.back().signature.prescale = -0.5;
    cases.back().signature.postscale = 8;
  }
  ExpectLikeReference(cases);
}

TEST_P(AdasumLanesTest, WhoHasNothingLeavesTheOthersAsTheyAre) {
  if (size() == 1) GTEST_SKIP() << "of one rank nobody has it";
  for (int without = 0; without < size(); ++without) {
    std::vector<RunCase> cases;
    for (const std::int64_t count : {3, 700}) {
      cases.push_back({.signature = {.reduction = ReduceOp::kAdasum, .shape = {count}},
                       .seed = 31,
                       .absent = without});
    }
    ExpectLikeReference(cases);
  }
  // Rank 0's result is looked at.
  for (int without = 1; without < size(); ++without) {
    ExpectLikeReference({{.signature = {.reduction = ReduceOp::kAdasum, .shape = {40}},
                          .seed = 32,
                          .joined = core::RankRanges{without}}});
  }
}

// Every rank has the same gradient: it is the result, whatever the number of ranks.
TEST_P(AdasumLanesTest, EqualGradientsAreTheResult) {
  const int ranks = size();
  InprocWorld world(ranks);
  RankThreads::Run(ranks, [&](int rank) {
    const std::unique_ptr<Backend> backend = world.Connect(rank);
    HostLanesOptions options;
    options.rank = rank;
    HostLanes lanes(std::move(options), *backend);
    std::vector<float> gradient = {1, -2, 3.5, 0, 1e-3f, 6, 7};
    const std::vector<float> before = gradient;
    core::RunBatch batch = SmallBatch(ranks);
    batch.limits = {};
    core::RunItem item;
    item.key = core::Key::Named(core::kWorldSet, "w");
    item.signature = std::make_shared<const core::Signature>(
        core::Signature{.reduction = ReduceOp::kAdasum, .shape = {7}});
    item.work = std::make_shared<core::Work>();
    item.work->input = item.work->output = gradient.data();
    item.work->handle = std::make_shared<core::HandleState>();
    const core::HandlePtr handle = item.work->handle;
    batch.items.push_back(std::move(item));
    lanes.Start(std::move(batch), core::Clock::now());
    while (!handle->done()) {
      if (!lanes.Step()) std::this_thread::yield();
    }
    EXPECT_TRUE(handle->status().ok()) << handle->status().ToString();
    EXPECT_EQ(gradient, before);
  });
}

}  // namespace
}  // namespace sirtaki::ops
