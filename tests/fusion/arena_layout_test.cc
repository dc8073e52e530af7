// Where tensors lie in an arena.
#include "fusion/arena_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace sirtaki::fusion {
namespace {

using ::testing::ElementsAre;

TEST(ArenaLayoutTest, TensorsBeginWhereTheWidestLoadMay) {
  EXPECT_THAT(PackedStarts({4, 16, 20, 0, 1}), ElementsAre(0, 16, 32, 64, 64, 65));
  EXPECT_THAT(PackedStarts({7}), ElementsAre(0, 7));
  EXPECT_THAT(PackedStarts({}), ElementsAre(0));
}

TEST(ArenaLayoutTest, BucketsFollowEachOther) {
  const ArenaLayout layout = LayOutArena({{4, 600}, {8}, {3000, 12}});
  EXPECT_THAT(layout.starts,
              ElementsAre(ElementsAre(0, 16), ElementsAre(1024), ElementsAre(1536, 4544)));
  EXPECT_EQ(layout.bytes, 8192);
}

TEST(ArenaLayoutTest, ABucketLiesAsItIsPackedAndNothingOverlaps) {
  const auto seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::vector<std::int64_t>> buckets(random() % 6);
    for (auto& tensors : buckets) {
      tensors.resize(1 + random() % 8);
      for (std::int64_t& bytes : tensors) bytes = static_cast<std::int64_t>(random() % 9000);
    }
    const ArenaLayout layout = LayOutArena(buckets);
    ASSERT_EQ(layout.starts.size(), buckets.size());
    EXPECT_EQ(layout.bytes % 4096, 0);
    std::int64_t end = 0;
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      ASSERT_EQ(layout.starts[b].size(), buckets[b].size());
      const std::vector<std::int64_t> packed = PackedStarts(buckets[b]);
      for (std::size_t t = 0; t < buckets[b].size(); ++t) {
        EXPECT_GE(layout.starts[b][t], end);
        EXPECT_EQ(layout.starts[b][t] - layout.starts[b].front(), packed[t]);
        end = layout.starts[b][t] + buckets[b][t];
      }
    }
    EXPECT_LE(end, layout.bytes);
  }
}

}  // namespace
}  // namespace sirtaki::fusion
