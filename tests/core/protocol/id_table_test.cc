#include "core/protocol/id_table.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <utility>

#include "tests/support/test_scale.h"

namespace sirtaki::core {
namespace {

using tests::ScaledCount;
using tests::TestSeed;

SignaturePtr OfShape(std::int64_t rows) {
  auto signature = std::make_shared<Signature>();
  signature->shape = {rows};
  return signature;
}

TEST(IdTableTest, AnEvictedIdIsResolvedUntilItIsForgottenAndNotFound) {
  IdTable table;
  const Key key = Key::Named(kWorldSet, "w");
  table.Insert(1, key, OfShape(3));
  EXPECT_EQ(table.Find(key, *OfShape(3)), 1U);
  EXPECT_EQ(table.Find(key, *OfShape(4)), kNoId);
  EXPECT_EQ(table.Find(Key::Named(kWorldSet, "v"), *OfShape(3)), kNoId);
  EXPECT_TRUE(table.Evict(1));
  EXPECT_FALSE(table.Evict(1));
  EXPECT_EQ(table.Find(key, *OfShape(3)), kNoId);
  ASSERT_NE(table.Resolve(1), nullptr);
  EXPECT_EQ(table.Resolve(1)->key, key);
  table.Forget(1);
  EXPECT_EQ(table.Resolve(1), nullptr);
}

// The table does what a list that is searched does, used as a seat does: few ids and many, of few keys.
TEST(IdTableTest, FindsWhatASearchOfAllFinds) {
  std::mt19937_64 random(TestSeed());
  const auto below = [&random](std::uint64_t n) { return random() % n; };
  for (const std::size_t capacity : {1, 9, 40, 300}) {
    IdTable table;
    std::map<AgreedId, std::pair<Key, std::int64_t>> live;
    AgreedId next = 1;
    for (int i = 0, end = ScaledCount(4000, 100000); i < end; ++i) {
      const Key key = below(4) == 0 ? Key::Named(kWorldSet, below(2) == 0 ? "a" : "b")
                                    : Key::Unnamed(kWorldSet, below(1000));
      const Key table_key = key.form == Key::Form::kUnnamed ? Key::Unnamed(kWorldSet, 0) : key;
      const auto rows = static_cast<std::int64_t>(below(2 * capacity));
      AgreedId expected = kNoId;
      for (const auto& [id, what] : live) {
        if (what == std::make_pair(table_key, rows)) expected = id;
      }
      ASSERT_EQ(table.Find(key, *OfShape(rows)), expected) << key.ToString() << " of " << rows;
      if (expected == kNoId) {
        live.emplace(next, std::make_pair(table_key, rows));
        table.Insert(next++, key, OfShape(rows));
      } else {
        ASSERT_EQ(table.Use(key, *OfShape(rows)), expected);
      }
      while (table.live() > capacity) {
        const AgreedId oldest = table.LeastRecentlyRun();
        ASSERT_EQ(live.erase(oldest), 1U);
        ASSERT_TRUE(table.Evict(oldest));
        if (below(2) == 0) table.Forget(oldest);
      }
    }
    EXPECT_EQ(table.live(), live.size());
  }
}

}  // namespace
}  // namespace sirtaki::core
