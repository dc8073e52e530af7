// Many tensors at once over shared memory, whoever sees what of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "ops/inproc/inproc_backend.h"
#include "tests/support/rank_threads.h"
#include "tests/support/shm_ranks.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops::shm {
namespace {

using tests::RankThreads;
using tests::Seen;
using tests::ShmRanks;

void Finish(Completion& operation) {
  const core::TimePoint limit = core::Clock::now() + std::chrono::seconds(30);
  while (!operation.Poll()) {
    ASSERT_LT(core::Clock::now(), limit);
    std::this_thread::yield();
  }
  EXPECT_TRUE(operation.status().ok()) << operation.status().ToString();
}

// What the ranks do with one tensor, drawn from a seed that they share.
struct Plan {
  std::int64_t count = 0;
  std::vector<bool> gives;
  std::vector<bool> takes;
  std::vector<bool> pooled;    // in memory of the backend's
  std::vector<bool> in_place;  // where both
  std::vector<bool> keeps;     // a part alone of what it takes
};

std::vector<Plan> Draw(int size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Plan> plans(1 + random() % 40);
  const bool mixed = seed % 3 != 0;
  for (Plan& plan : plans) {
    const unsigned scale = random() % 8;
    plan.count = scale == 0 ? 0 : static_cast<std::int64_t>(random() % (scale == 1 ? 300000 : 700));
    for (int rank = 0; rank < size; ++rank) {
      plan.gives.push_back(!mixed || random() % 5 != 0);
      plan.takes.push_back(!mixed || random() % 5 != 0);
      plan.pooled.push_back(!mixed || random() % 6 != 0);
      plan.in_place.push_back(random() % 3 != 0);
    }
    // By all, by none, or by some.
    const unsigned keeping = random() % 3;
    for (std::size_t rank = 0; rank < plan.takes.size(); ++rank) {
      plan.keeps.push_back(plan.takes[rank] &&
                           (keeping == 0 || (keeping == 1 && random() % 2 == 0)));
    }
  }
  return plans;
}

// One rank's tensors of a drawing.
template <typename T>
class Tensors {
 public:
  Tensors(core::MemorySource& memory, const std::vector<Plan>& plans, int rank)
      : plans_(plans), rank_(static_cast<std::size_t>(rank)) {
    for (std::size_t i = 0; i < plans.size(); ++i) {
      const Plan& plan = plans[i];
      core::MemorySource& source = plan.pooled[rank_] ? memory : core::PlainMemory();
      constexpr auto element = static_cast<std::int64_t>(sizeof(T));
      const std::int64_t bytes = plan.count * element;
      Segment segment{.count = plan.count};
      if (plan.gives[rank_]) segment.input = Fill(source.Allocate(bytes), i);
      if (plan.takes[rank_] && plan.gives[rank_] && plan.in_place[rank_]) {
        segment.output = held_.back().get();
      } else if (plan.takes[rank_]) {
        held_.push_back(source.Allocate(bytes));
        segment.output = held_.back().get();
      }
      if (plan.keeps[rank_]) {
        // Parts that leave gaps, one of them empty.
        const std::int64_t begin = plan.count * static_cast<std::int64_t>(rank_) / 4;
        const std::int64_t count = rank_ == 1 ? 0 : (plan.count + 3) / 4;
        const std::int64_t end = std::min(plan.count, begin + count);
        held_.push_back(core::PlainMemory().Allocate((end - begin) * element));
        kept_.push_back(std::make_unique<core::KeptPart>(
            core::KeptPart{begin * element, (end - begin) * element, held_.back().get()}));
        segment.kept = kept_.back().get();
      }
      segments.push_back(segment);
    }
  }

  static T Value(std::size_t tensor, std::size_t rank, std::int64_t i) {
    return static_cast<T>(static_cast<std::int64_t>(tensor * 5 + rank * 3) % 11 + i % 17 - 8);
  }

  // Halves of small whole numbers: exact.
  std::int64_t Wrong() const {
    std::int64_t wrong = 0;
    for (std::size_t t = 0; t < plans_.size(); ++t) {
      const Plan& plan = plans_[t];
      bool given = false;
      for (const bool gives : plan.gives) given = given || gives;
      if (!given || !plan.takes[rank_]) continue;
      const core::KeptPart* const kept = segments[t].kept;
      constexpr auto element = static_cast<std::int64_t>(sizeof(T));
      const std::int64_t begin = kept == nullptr ? 0 : kept->begin / element;
      const std::int64_t end = kept == nullptr ? plan.count : begin + kept->bytes / element;
      const auto* result = static_cast<const T*>(segments[t].output);
      if (kept != nullptr && kept->is_there) result = static_cast<const T*>(kept->memory) - begin;
      for (std::int64_t i = begin; i < end; ++i) {
        T sum = 0;
        for (std::size_t r = 0; r < plan.gives.size(); ++r) {
          if (plan.gives[r]) sum += Value(t, r, i);
        }
        if (result[i] != sum / 2) ++wrong;
      }
    }
    return wrong;
  }

  std::vector<Segment> segments;

 private:
  void* Fill(std::shared_ptr<void> memory, std::size_t tensor) {
    for (std::int64_t i = 0; i < plans_[tensor].count; ++i) {
      static_cast<T*>(memory.get())[i] = Value(tensor, rank_, i);
    }
    held_.push_back(std::move(memory));
    return held_.back().get();
  }

  const std::vector<Plan>& plans_;
  const std::size_t rank_;
  std::vector<std::shared_ptr<void>> held_;
  std::vector<std::unique_ptr<core::KeptPart>> kept_;
};

class ShmReductionsTest : public ::testing::TestWithParam<std::tuple<int, Seen>> {};

TEST_P(ShmReductionsTest, ReduceWhatIsGivenIntoWhatIsWanted) {
  const auto [size, seen] = GetParam();
  ShmRanks ranks(size, seen);
  InprocWorld messages(size);
  RankThreads::Run(size, [&, n = size](int rank) {
    const std::unique_ptr<ops::Backend> flat = messages.Connect(rank);
    const auto shared = ranks.Connect(rank, *flat, {.spin = false, .chunk_bytes = 16384});
    ops::Backend& backend = *shared->backend.Select({}).backend;
    for (unsigned seed = 1; seed <= 12; ++seed) {
      const std::vector<Plan> plans = Draw(n, seed);
      for (const fusion::Lane lane : {fusion::Lane::kSmall, fusion::Lane::kLarge}) {
        SegmentReduction how{.after = {.factor = 0.5}};
        Tensors<float> floats(backend.memory(), plans, rank);
        ASSERT_TRUE(backend.ReducesSegments(how));
        Finish(*backend.AllReduceSegments({core::kWorldSet, lane}, floats.segments, how));
        EXPECT_EQ(floats.Wrong(), 0) << "seed " << seed;

        how = {.dtype = core::DType::kI32, .op = core::ReduceOp::kAverage, .after = {.divisor = 2}};
        Tensors<std::int32_t> integers(backend.memory(), plans, rank);
        Finish(*backend.AllReduceSegments({core::kWorldSet, lane}, integers.segments, how));
        EXPECT_EQ(integers.Wrong(), 0) << "seed " << seed;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, ShmReductionsTest,
                         ::testing::ValuesIn(tests::SampleOf<std::tuple<int, Seen>>(
                             ::testing::Combine(::testing::Values(1, 2, 3, 5),
                                                ::testing::Values(Seen::kAll, Seen::kNothing,
                                                                  Seen::kPools)))),
                         [](const auto& made) {
                           return std::to_string(std::get<0>(made.param)) + "Seeing" +
                                  std::string(tests::SeenName(std::get<1>(made.param)));
                         });

TEST(ShmReductionsBitsTest, DependNeitherOnWhatIsSeenNorOnTheLaneNorOnTheLength) {
  constexpr int kSize = 3;
  constexpr std::int64_t kCount = 50001;
  constexpr std::int64_t kLengths[] = {kCount, 5000};  // in parts, and whole on every member
  std::optional<std::vector<float>> expected;
  for (const Seen seen : {Seen::kAll, Seen::kNothing, Seen::kPools}) {
    ShmRanks ranks(kSize, seen);
    InprocWorld messages(kSize);
    std::vector<std::vector<float>> results(4 * kSize);
    RankThreads::Run(kSize, [&](int rank) {
      const std::unique_ptr<ops::Backend> flat = messages.Connect(rank);
      const auto shared = ranks.Connect(rank, *flat, {.spin = false});
      ops::Backend& backend = *shared->backend.Select({}).backend;
      for (const int way : {0, 1, 2, 3}) {
        const auto memory = backend.memory().Allocate(kCount * 4);
        auto* const values = static_cast<float*>(memory.get());
        for (std::int64_t i = 0; i < kCount; ++i) {
          values[i] = 1.0f / static_cast<float>(i + 1 + rank * 17);
        }
        const SegmentReduction how{.before = {.factor = 0.3}, .after = {.divisor = 7}};
        const std::int64_t length = kLengths[way / 2];
        for (std::int64_t i = 0; i < kCount; i += length) {
          const Segment segment{values + i, values + i, std::min(length, kCount - i)};
          Finish(*backend.AllReduceSegments(
              {core::kWorldSet, way % 2 == 0 ? fusion::Lane::kSmall : fusion::Lane::kLarge},
              {&segment, 1}, how));
        }
        results[static_cast<std::size_t>(rank * 4 + way)].assign(values, values + kCount);
      }
    });
    for (const std::vector<float>& result : results) {
      if (!expected) expected = result;
      EXPECT_EQ(std::memcmp(result.data(), expected->data(), kCount * 4), 0);
    }
  }
}

// A member writes what it keeps, and nothing of the others'; what a member sees of another's memory
// makes no difference to the bits.
TEST(ShmReductionsKeptTest, WhatAllKeepIsBroughtToEachAlone) {
  constexpr int kSize = 3;
  constexpr std::int64_t kCount =
      600000;  // more than is reduced between two looks at the stop sign
  ShmRanks ranks(kSize, Seen::kAll);
  InprocWorld messages(kSize);
  RankThreads::Run(kSize, [&](int rank) {
    const std::unique_ptr<ops::Backend> flat = messages.Connect(rank);
    const auto shared = ranks.Connect(rank, *flat, {.spin = false});
    ops::Backend& backend = *shared->backend.Select({}).backend;
    const auto given = backend.memory().Allocate(kCount * 4);
    const auto whole = backend.memory().Allocate(kCount * 4);
    auto* const values = static_cast<float*>(given.get());
    for (std::int64_t i = 0; i < kCount; ++i) {
      values[i] = 1.0f / static_cast<float>(i + 1 + rank * 17);
    }
    const std::vector<float> before(values, values + kCount);
    const SegmentReduction how{.before = {.factor = 0.3}, .after = {.divisor = 7}};
    const core::KeptPart parts[] = {{0, 2400000}, {0, 0}, {64, 4}};
    core::KeptPart kept = parts[rank];
    std::vector<float> memory(static_cast<std::size_t>(kept.bytes / 4));
    kept.memory = memory.data();
    const Segment segment{values, values, kCount, &kept};
    Finish(*backend.AllReduceSegments({core::kWorldSet, fusion::Lane::kLarge}, {&segment, 1}, how));
    EXPECT_TRUE(kept.is_there);
    EXPECT_EQ(std::memcmp(values, before.data(), kCount * 4), 0);

    const Segment all{values, whole.get(), kCount};
    Finish(*backend.AllReduceSegments({core::kWorldSet, fusion::Lane::kLarge}, {&all, 1}, how));
    EXPECT_EQ(std::memcmp(memory.data(), static_cast<std::byte*>(whole.get()) + kept.begin,
                          memory.size() * 4),
              0);
  });
}

TEST(ShmReductionsLengthTest, WhatIsLongerThanTheRingsGoesRoundThem) {
  constexpr int kSize = 3;
  constexpr std::int64_t kCount = 2000003;
  ShmRanks ranks(kSize, Seen::kNothing);
  InprocWorld messages(kSize);
  RankThreads::Run(kSize, [&](int rank) {
    const std::unique_ptr<ops::Backend> flat = messages.Connect(rank);
    const auto shared = ranks.Connect(rank, *flat, {.spin = false});
    ops::Backend& backend = *shared->backend.Select({}).backend;
    for (const fusion::Lane lane : {fusion::Lane::kSmall, fusion::Lane::kLarge}) {
      std::vector<float> values(kCount);
      for (std::int64_t i = 0; i < kCount; ++i) {
        values[static_cast<std::size_t>(i)] = static_cast<float>(i % 1000 + rank);
      }
      const Segment segment{values.data(), values.data(), kCount};
      Finish(*backend.AllReduceSegments({core::kWorldSet, lane}, {&segment, 1}, {}));
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < kCount; ++i) {
        const auto sum = static_cast<float>(i % 1000 * 3 + 0 + 1 + 2);
        wrong += values[static_cast<std::size_t>(i)] == sum ? 0 : 1;
      }
      EXPECT_EQ(wrong, 0);
    }
  });
}

}  // namespace
}  // namespace sirtaki::ops::shm
