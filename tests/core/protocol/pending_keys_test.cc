#include "core/protocol/pending_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace sirtaki::core {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

Key Named(const std::string& name) { return Key::Named(kWorldSet, name); }

std::vector<std::string> NamesOf(PendingKeys& keys) {
  std::vector<std::string> names;
  for (const PendingKey* const pending : keys.Undecided()) {
    names.push_back(pending->key->name.text());
  }
  return names;
}

TEST(PendingKeysTest, WaitInTheOrderOfTheirFirstReport) {
  PendingKeys keys;
  for (const char* const name : {"a", "b", "c"}) keys.Add(Named(name), {});
  keys.Add(Named("a"), {});
  EXPECT_THAT(NamesOf(keys), ElementsAre("a", "b", "c"));
  EXPECT_EQ(keys.next_order(), 3U);
  keys.Find(Named("c"))->forwarded = true;
  EXPECT_THAT(NamesOf(keys), ElementsAre("a", "b")) << "what is decided is left out";
  keys.Erase(Named("b"));
  keys.Erase(Named("a"));
  EXPECT_EQ(keys.Oldest(), keys.Find(Named("c")));
  keys.Erase(Named("c"));
  EXPECT_EQ(keys.Oldest(), nullptr);
}

TEST(PendingKeysTest, AKeyThatComesAgainHasNothingOfItsLastUse) {
  PendingKeys keys;
  PendingKey& first = keys.Add(Named("a"), {});
  first.Merge({}, "of no type", RankRanges::Single(1));
  first.Stall().warned = true;
  first.reports = 1;
  first.absent = {true};
  keys.Erase(first);
  EXPECT_EQ(keys.Find(Named("a")), nullptr);
  keys.Add(Named("b"), {});
  const PendingKey& again = keys.Add(Named("a"), TimePoint(Duration(7)));
  EXPECT_EQ(&again, &first) << "its memory serves again";
  EXPECT_THAT(again.variants, IsEmpty());
  EXPECT_THAT(again.absent, IsEmpty());
  EXPECT_EQ(again.stall, nullptr);
  EXPECT_EQ(again.reports, 0);
  EXPECT_EQ(again.since, TimePoint(Duration(7)));
  EXPECT_THAT(NamesOf(keys), ElementsAre("b", "a"));
}

// Whatever is kept of keys that are used once, those that wait stay.
TEST(PendingKeysTest, ThousandsOfNamesThatAreUsedOnce) {
  PendingKeys keys;
  keys.Add(Named("stays"), {});
  for (int i = 0; i < 5000; ++i) {
    keys.Add(Named(std::to_string(i)), {});
    keys.Erase(Named(std::to_string(i)));
  }
  EXPECT_THAT(NamesOf(keys), ElementsAre("stays"));
}

}  // namespace
}  // namespace sirtaki::core
