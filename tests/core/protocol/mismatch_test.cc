#include "core/protocol/mismatch.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace sirtaki::core {
namespace {

Variant Valid(std::vector<std::int64_t> shape, const RankRanges& ranks) {
  auto signature = std::make_shared<Signature>();
  signature->shape = std::move(shape);
  return {std::move(signature), {}, ranks};
}

Variant Invalid(std::string why, const RankRanges& ranks) {
  return {std::make_shared<Signature>(), std::move(why), ranks};
}

TEST(MismatchTextTest, IsInTheOrderOfTheRanksHoweverTheyArrived) {
  const std::vector<Variant> variants = {Valid({4}, RankRanges::Single(3)),
                                         Valid({3}, RankRanges::Span(0, 2))};
  EXPECT_EQ(MismatchText(Key::Named(0, "w"), variants, 0),
            "all-reduce \"w\": shape [3] on ranks 0-2, shape [4] on rank 3");
}

TEST(MismatchTextTest, OfChangesSaysWhatEachRankWants) {
  const std::vector<Variant> variants = {{AddSet{{0, 1}}, {}, RankRanges::Span(0, 2)},
                                         {RemoveSet{4}, {}, RankRanges::Single(3)}};
  EXPECT_EQ(MismatchText(Key::Named(0, "#change 1"), variants, 0),
            "change 1: adding a process set of ranks 0-1 on ranks 0-2, removing a process set of "
            "the number 4 "
            "on rank 3");
}

TEST(FailOriginTest, BlamesTheFirstRankWhoseArgumentIsWrong) {
  const std::vector<Variant> variants = {Invalid("rank 0 made me do it", RankRanges::Single(12)),
                                         Valid({3}, RankRanges::Single(0)),
                                         Invalid("no root", RankRanges::Span(3, 5))};
  const Key key = Key::Named(2, "rank 7: \"w");
  const std::string text = MismatchText(key, variants, 0);
  EXPECT_EQ(FailOrigin(key, StatusCode::kInvalidArgument, text), (Origin{3, {}, "rank 7: \"w"}))
      << text;
}

TEST(FailOriginTest, BlamesTheRankThatHasLeftOrJoined) {
  const Key key = Key::Unnamed(0, 4);
  EXPECT_EQ(FailOrigin(key, StatusCode::kShutDown,
                       "unnamed call #4: ranks 2-3 have shut down: the program exited"),
            (Origin{2, {}, "unnamed call #4"}));
  EXPECT_EQ(FailOrigin(key, StatusCode::kInvalidArgument,
                       "unnamed call #4: the root, rank 1, has joined"),
            (Origin{1, {}, "unnamed call #4"}));
  EXPECT_EQ(FailOrigin(Key::Join(0), StatusCode::kShutDown, "join: rank 5 has shut down: why"),
            (Origin{5, {}, {}}));
}

TEST(FailOriginTest, BlamesNobodyForAMismatch) {
  const Key key = Key::Named(0, "w");
  EXPECT_EQ(FailOrigin(key, StatusCode::kMismatch, "all-reduce \"w\": shape [3] on rank 0"),
            (Origin{-1, {}, "w"}));
  EXPECT_EQ(FailOrigin(key, StatusCode::kShutDown, ""), (Origin{-1, {}, "w"}));
  EXPECT_EQ(FailOrigin(key, StatusCode::kShutDown, "\"w\": rank"), (Origin{-1, {}, "w"}));
}

TEST(TensorNameTest, IsTheBareName) {
  EXPECT_EQ(TensorName(Key::Named(3, "a\"b\n")), "a\"b\n");
  EXPECT_EQ(TensorName(Key::Unnamed(3, 7)), "unnamed call #7");
  EXPECT_EQ(TensorName(Key::Bucket(0, 1, 3)), "bucket 3 of arena 1");
  EXPECT_EQ(TensorName(Key::Join(3)), "");
  EXPECT_EQ(TensorName(Key::Named(3, "sirtaki/load_checkpoint/parts")), "load_checkpoint");
}

TEST(MismatchTextTest, OfAGroupAndASingleTensorOnlyThatIsSaid) {
  Signature single;
  single.reduction = ReduceOp::kAverage;
  single.shape = {2};
  Signature group;
  group.parts.push_back(std::make_shared<const Signature>(single));
  const std::vector<Variant> variants{
      {std::make_shared<const Signature>(single), {}, RankRanges{0}},
      {std::make_shared<const Signature>(group), {}, RankRanges{1, 2}}};
  EXPECT_EQ(
      MismatchText(Key::Named(0, "w"), variants, 0),
      "all-reduce \"w\": one tensor, not grouped on rank 0, a group of 1 tensor on ranks 1-2");
}

}  // namespace
}  // namespace sirtaki::core
