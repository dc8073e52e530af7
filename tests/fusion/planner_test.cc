#include "fusion/planner.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "tests/support/test_scale.h"

namespace sirtaki::fusion {
namespace {

using core::DType;
using core::OpKind;
using core::RunBatch;
using core::RunItem;
using core::Signature;

RunItem Item(Signature signature) {
  RunItem item;
  item.key = core::Key::Named(core::kWorldSet, "t");
  item.signature = std::make_shared<const Signature>(std::move(signature));
  return item;
}

RunItem Floats(std::int64_t count) { return Item({.shape = {count}}); }
RunItem Gather() { return Item({.kind = OpKind::kAllGather, .shape = {1000000}}); }

using Items = std::vector<std::size_t>;

// The items of a group, in a batch of tensors without parts.
Items ItemsOf(const Group& group) {
  Items items;
  for (const Place& place : group.places) {
    EXPECT_EQ(place.part, 0U);
    items.push_back(place.item);
  }
  return items;
}

// A grouped call of tensors with so many elements each, or such a bucket.
RunItem Grouped(const std::vector<std::int64_t>& counts) {
  Signature whole;
  for (const std::int64_t count : counts) {
    whole.parts.push_back(std::make_shared<const Signature>(Signature{.shape = {count}}));
  }
  return Item(whole);
}
RunItem Bucket(std::uint64_t number, const std::vector<std::int64_t>& counts) {
  RunItem item = Grouped(counts);
  item.key = core::Key::Bucket(core::kWorldSet, 1, number);
  return item;
}

using Places = std::vector<Place>;

std::vector<Group> Plan(RunBatch batch, const core::Limits& limits, bool deterministic = false) {
  batch.limits = limits;
  return fusion::Plan(batch, deterministic);
}

TEST(PlannerTest, NothingGivesNothing) { EXPECT_TRUE(Plan({}, {}).empty()); }

TEST(PlannerTest, EqualKindsShareAGroup) {
  RunBatch batch;
  batch.items = {Floats(100), Floats(200), Floats(300)};
  const std::vector<Group> groups = Plan(batch, {});
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(ItemsOf(groups[0]), (Items{0, 1, 2}));
  EXPECT_EQ(groups[0].bytes, 2400);
  EXPECT_EQ(groups[0].lane, Lane::kSmall);
}

TEST(PlannerTest, GroupsLookPastOtherKinds) {
  RunBatch batch;
  batch.items = {Floats(1), Item({.dtype = DType::kF64, .shape = {1}}), Floats(1), Gather(),
                 Item({.dtype = DType::kF64, .shape = {1}})};
  const std::vector<Group> groups = Plan(batch, {});
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(ItemsOf(groups[0]), (Items{0, 2}));
  EXPECT_EQ(ItemsOf(groups[1]), (Items{1, 4}));
  EXPECT_EQ(ItemsOf(groups[2]), (Items{3}));
}

TEST(PlannerTest, AnythingThatChangesTheOperationSeparates) {
  const Signature base{.shape = {4}};
  std::vector<RunItem> items;
  const auto add = [&](auto change) {
    Signature signature = base;
    change(signature);
    items.push_back(Item(signature));
  };
  add([](Signature&) {});
  add([](Signature& s) { s.reduction = core::ReduceOp::kAverage; });
  add([](Signature& s) { s.dtype = DType::kBF16; });
  add([](Signature& s) { s.wire = DType::kF16; });
  add([](Signature& s) { s.wire = DType::kBF16; });
  add([](Signature& s) { s.device = core::DeviceKind::kCuda; });
  add([](Signature& s) { s.slot = 1; });
  add([](Signature& s) { s.prescale = 0.5; });
  add([](Signature& s) { s.postscale = 0.5; });
  add([](Signature& s) { s.kind = OpKind::kAllGather; });
  add([](Signature& s) { s.kind = OpKind::kBroadcast, s.root = 0; });
  add([](Signature& s) { s.kind = OpKind::kBroadcast, s.root = 1; });
  add([](Signature&) {});
  items.back().silent = core::RankRanges{2};
  add([](Signature&) {});
  items.back().silent = core::RankRanges{3};
  RunBatch batch;
  batch.items = items;
  batch.items.insert(batch.items.end(), items.begin(), items.end());
  const std::vector<Group> groups = Plan(batch, {});
  ASSERT_EQ(groups.size(), items.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    EXPECT_EQ(ItemsOf(groups[i]), (Items{i, i + items.size()}));
  }
}

TEST(PlannerTest, AFullGroupIsFollowedByAnother) {
  RunBatch batch;
  batch.items = {Floats(60), Floats(40), Floats(1), Floats(99)};
  const std::vector<Group> groups = Plan(batch, {.fusion_bytes = 400, .small_bytes = 0});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(ItemsOf(groups[0]), (Items{0, 1}));
  EXPECT_EQ(ItemsOf(groups[1]), (Items{2, 3}));
  EXPECT_EQ(groups[0].lane, Lane::kLarge);
}

TEST(PlannerTest, ATensorAboveTheLimitIsAloneAndClosesNoGroup) {
  RunBatch batch;
  batch.items = {Floats(10), Floats(101), Floats(10), Floats(500)};
  const std::vector<Group> groups = Plan(batch, {.fusion_bytes = 400});
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(ItemsOf(groups[0]), (Items{0, 2}));
  EXPECT_EQ(ItemsOf(groups[1]), (Items{1}));
  EXPECT_EQ(ItemsOf(groups[2]), (Items{3}));
}

TEST(PlannerTest, TheSmallLaneTakesGroupsUpToItsLimit) {
  RunBatch batch;
  batch.items = {Floats(4), Item({.dtype = DType::kU8, .shape = {17}}),
                 Item({.dtype = DType::kF64, .shape = {}})};
  const std::vector<Group> groups = Plan(batch, {.small_bytes = 16});
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].lane, Lane::kSmall);
  EXPECT_EQ(groups[1].lane, Lane::kLarge);
  EXPECT_EQ(groups[2].lane, Lane::kSmall);
  EXPECT_EQ(groups[2].bytes, 8);
}

TEST(PlannerTest, GathersAreCountedNeverMeasured) {
  RunBatch batch;
  batch.items.assign(2 * kGatherCount + 1, Gather());
  const std::vector<Group> groups = Plan(batch, {.fusion_bytes = 1});
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(ItemsOf(groups[0]).size(), kGatherCount);
  EXPECT_EQ(ItemsOf(groups[0]).back(), kGatherCount - 1);
  EXPECT_EQ(ItemsOf(groups[2]), (Items{2 * kGatherCount}));
  for (const Group& group : groups) {
    EXPECT_EQ(group.lane, Lane::kLarge);
    EXPECT_EQ(group.bytes, 0);
  }
}

TEST(PlannerTest, KindsWhoseRowsDifferAreCountedAndLarge) {
  for (const OpKind kind :
       {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
    RunBatch batch;
    batch.items.assign(kGatherCount + 1, Item({.kind = kind, .shape = {}}));
    const std::vector<Group> groups = Plan(batch, {.fusion_bytes = 1});
    ASSERT_EQ(groups.size(), 2u);
    EXPECT_EQ(ItemsOf(groups[1]), (Items{kGatherCount}));
    EXPECT_EQ(groups[0].lane, Lane::kLarge);
  }
}

TEST(PlannerTest, KindsOfEqualShapesAreMeasured) {
  for (const OpKind kind :
       {OpKind::kBroadcast, OpKind::kAllGatherInto, OpKind::kReduce, OpKind::kReduceScatter}) {
    RunBatch batch;
    for (int i = 0; i < 3; ++i) batch.items.push_back(Item({.kind = kind, .shape = {10, 10}}));
    const std::vector<Group> groups = Plan(batch, {.fusion_bytes = 800, .small_bytes = 500});
    ASSERT_EQ(groups.size(), 2u);
    EXPECT_EQ(ItemsOf(groups[0]), (Items{0, 1}));
    EXPECT_EQ(groups[0].bytes, 800);
    EXPECT_EQ(groups[0].lane, Lane::kLarge);
    EXPECT_EQ(groups[1].lane, kind == OpKind::kAllGatherInto ? Lane::kLarge : Lane::kSmall);
  }
}

// The small lane starts a group's only operation at once, in the order of the plan.
TEST(PlannerTest, OnlyWhatIsOneSmallOperationGoesToTheSmallLane) {
  const auto lane_of = [](const Signature& signature) {
    RunBatch batch;
    batch.items = {Item(signature)};
    return Plan(batch, {.small_bytes = 1600})[0].lane;
  };
  EXPECT_EQ(lane_of({.reduction = core::ReduceOp::kAdasum, .shape = {1}}), Lane::kLarge);
  EXPECT_EQ(lane_of({.kind = OpKind::kAllGatherInto, .shape = {25}}), Lane::kSmall);
  EXPECT_EQ(lane_of({.kind = OpKind::kAllGatherInto, .shape = {26}}), Lane::kLarge)
      << "every rank gets what all give";
  EXPECT_EQ(lane_of({.kind = OpKind::kReduceScatter, .shape = {400}}), Lane::kSmall);
}

TEST(PlannerTest, ABarrierIsSmall) {
  RunBatch batch;
  batch.items = {Item({.kind = OpKind::kBarrier}), Floats(2), Item({.kind = OpKind::kBarrier})};
  const std::vector<Group> groups = Plan(batch, {.small_bytes = 0});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(ItemsOf(groups[0]), (Items{0, 2}));
  EXPECT_EQ(groups[0].bytes, 0);
  EXPECT_EQ(groups[0].lane, Lane::kSmall);
}

TEST(PlannerTest, AGroupedCallSharesGroupsWithOthers) {
  RunBatch batch;
  batch.items = {Floats(1), Grouped({2, 3}), Gather(), Grouped({4}), Floats(5)};
  const std::vector<Group> groups = Plan(batch, {});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].places, (Places{{0, 0}, {1, 0}, {1, 1}, {3, 0}, {4, 0}}));
  EXPECT_EQ(groups[0].bytes, 60);
}

TEST(PlannerTest, ABucketSharesItsGroupsWithNothingElse) {
  RunBatch batch;
  batch.items = {Floats(1), Bucket(0, {2, 3}), Floats(4), Bucket(1, {5}), Floats(6)};
  const std::vector<Group> groups = Plan(batch, {});
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].places, (Places{{0, 0}, {2, 0}, {4, 0}}));
  EXPECT_EQ(groups[1].places, (Places{{1, 0}, {1, 1}}));
  EXPECT_EQ(groups[2].places, (Places{{3, 0}}));
}

TEST(PlannerTest, ABucketAboveTheLimitIsSeveralGroups) {
  RunBatch batch;
  batch.items = {Bucket(0, {60, 40, 1, 200, 99})};
  const std::vector<Group> groups = Plan(batch, {.fusion_bytes = 400});
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].places, (Places{{0, 0}, {0, 1}}));
  EXPECT_EQ(groups[1].places, (Places{{0, 2}, {0, 4}}));
  EXPECT_EQ(groups[2].places, (Places{{0, 3}}));
}

TEST(PlannerTest, WhereBitsMustNotDependOnTimeOnlyBucketsAreGroups) {
  RunBatch batch;
  batch.items = {Floats(1), Bucket(0, {2, 4}), Floats(3), Gather(), Gather(), Grouped({5, 6})};
  const std::vector<Group> groups = Plan(batch, {}, /*deterministic=*/true);
  ASSERT_EQ(groups.size(), 7u);
  EXPECT_EQ(groups[1].places, (Places{{1, 0}, {1, 1}}));
}

TEST(PlannerTest, AnArenaIsMadeAlone) {
  RunBatch batch;
  const Signature arena{.kind = OpKind::kMakeArena, .device = core::DeviceKind::kCuda};
  batch.items = {Item(arena), Item(arena)};
  EXPECT_EQ(Plan(batch, {}).size(), 2U);
}

TEST(PlannerTest, PartsThatNobodyHasAreInNoGroup) {
  RunBatch batch;
  batch.items = {Bucket(0, {2, 3, 4}), Bucket(1, {5})};
  batch.items[0].absent = {false, true, false};
  batch.items[1].absent = {true};
  const std::vector<Group> groups = Plan(batch, {});
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].places, (Places{{0, 0}, {0, 2}}));
}

TEST(PlannerTest, WhatNobodyHasIsInNoGroup) {
  RunBatch batch;
  batch.items = {Floats(1), Floats(1), Floats(1)};
  batch.items[1].absent = {true};
  const std::vector<Group> groups = Plan(batch, {});
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(ItemsOf(groups[0]), (Items{0, 2}));
  batch.items[0].absent = batch.items[2].absent = {true};
  EXPECT_TRUE(Plan(batch, {}).empty());
}

TEST(PlannerTest, AbsurdSizesDoNotOverflow) {
  RunBatch batch;
  const std::int64_t huge = std::int64_t{1} << 62;
  batch.items = {Floats(huge), Floats(huge), Floats(1)};
  const std::vector<Group> groups =
      Plan(batch, {.fusion_bytes = std::numeric_limits<std::int64_t>::max()});
  std::size_t items = 0;
  for (const Group& group : groups) {
    EXPECT_GE(group.bytes, 0);
    items += group.places.size();
  }
  EXPECT_EQ(items, 3u);
}

RunBatch RandomBatch(std::mt19937_64& random) {
  const auto below = [&](std::uint64_t n) { return static_cast<int>(random() % n); };
  RunBatch batch;
  const int count = below(200);
  for (int i = 0; i < count; ++i) {
    Signature s;
    s.kind = static_cast<OpKind>(below(static_cast<int>(OpKind::kBarrier) + 1));
    s.dtype = static_cast<DType>(below(core::kDTypeCount));
    if (core::Reduces(s.kind)) {
      s.reduction = static_cast<core::ReduceOp>(below(core::kReduceOpCount));
    }
    if (core::HasRoot(s.kind)) s.root = below(2);
    if (below(4) == 0) s.prescale = 0.5;
    if (below(4) == 0) s.wire = DType::kF16;
    s.shape = {below(2) == 0 ? below(10) : below(3000)};
    RunItem item = Item(s);
    item.absent = {below(8) == 0};
    if (below(8) == 0) item.silent = core::RankRanges{below(3)};
    batch.items.push_back(item);
  }
  return batch;
}

auto ClassOf(const RunItem& item) {
  const Signature& s = *item.signature;
  return std::tuple(s.kind, s.reduction, s.dtype, s.wire, s.root, s.prescale, s.postscale,
                    item.silent.ToString());
}

void ExpectGoodPlan(const RunBatch& batch, const core::Limits& limits,
                    const std::vector<Group>& groups) {
  std::set<std::size_t> seen;
  std::size_t last_first = 0;
  for (const Group& group : groups) {
    const Items items = ItemsOf(group);
    ASSERT_FALSE(items.empty());
    EXPECT_TRUE(seen.empty() || items.front() > last_first);
    last_first = items.front();
    const RunItem& first = batch.items[items.front()];
    const bool gather = core::FirstDimensionVaries(first.signature->kind);
    const bool barrier = first.signature->kind == OpKind::kBarrier;
    std::int64_t bytes = 0;
    std::size_t before = 0;
    for (const std::size_t i : items) {
      ASSERT_LT(i, batch.items.size());
      EXPECT_TRUE(i == items.front() || i > before);
      before = i;
      EXPECT_TRUE(seen.insert(i).second) << "item " << i << " is in two groups";
      EXPECT_FALSE(core::AllAbsent(batch.items[i].absent));
      EXPECT_EQ(ClassOf(batch.items[i]), ClassOf(first));
      const Signature& s = *batch.items[i].signature;
      if (!gather && !barrier)
        bytes += s.ElementCount() * static_cast<std::int64_t>(core::SizeOf(s.dtype));
    }
    EXPECT_EQ(group.bytes, bytes);
    EXPECT_TRUE(bytes <= limits.fusion_bytes || items.size() == 1);
    if (gather) {
      EXPECT_LE(items.size(), kGatherCount);
    }
    const bool into = first.signature->kind == OpKind::kAllGatherInto;
    const bool small = !gather && first.signature->reduction != core::ReduceOp::kAdasum &&
                       bytes <= limits.small_bytes / (into ? 16 : 1);
    EXPECT_EQ(group.lane, small ? Lane::kSmall : Lane::kLarge);
  }
  for (std::size_t i = 0; i < batch.items.size(); ++i) {
    EXPECT_EQ(!seen.contains(i), core::AllAbsent(batch.items[i].absent)) << "item " << i;
  }
}

TEST(PlannerTest, RandomBatchesKeepTheRules) {
  std::mt19937_64 random(tests::TestSeed());
  const int rounds = tests::ScaledCount(300, 20000);
  for (int round = 0; round < rounds; ++round) {
    const RunBatch batch = RandomBatch(random);
    const core::Limits limits{.fusion_bytes = static_cast<std::int64_t>(random() % 20000),
                              .small_bytes = static_cast<std::int64_t>(random() % 3000)};
    const std::vector<Group> groups = Plan(batch, limits);
    ExpectGoodPlan(batch, limits, groups);

    // Another rank has other work, other objects, and the same plan.
    RunBatch other = batch;
    for (RunItem& item : other.items) {
      item.signature = std::make_shared<const Signature>(*item.signature);
      item.work = std::make_shared<core::Work>();
      item.work->rows = static_cast<std::int64_t>(random() % 1000);
      item.work->splits.assign(random() % 4, item.work->rows);
      item.work->request.absent.assign(random() % 2, true);
      if (random() % 8 == 0) item.work = nullptr;
    }
    const std::vector<Group> theirs = Plan(other, limits);
    ASSERT_EQ(groups.size(), theirs.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      EXPECT_EQ(ItemsOf(groups[g]), ItemsOf(theirs[g]));
      EXPECT_EQ(groups[g].lane, theirs[g].lane);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace sirtaki::fusion
