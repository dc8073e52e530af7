// A batch becomes groups: whose tensors are in which, and when a handle completes.
#include "ops/groups/group_task.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace sirtaki::ops {
namespace {

using Groups = std::vector<std::shared_ptr<GroupTask>>;

// A call of tensors with so many float32 each: one, or a grouped one. `has_work`: this rank has not
// joined.
core::RunItem CallOf(const std::string& name, const std::vector<std::int64_t>& counts,
                     bool has_work = true) {
  core::Signature signature;
  auto work = std::make_shared<core::Work>();
  work->handle = std::make_shared<core::HandleState>();
  if (counts.size() == 1) signature.shape = counts;
  for (std::size_t i = 0; counts.size() > 1 && i < counts.size(); ++i) {
    signature.parts.push_back(
        std::make_shared<const core::Signature>(core::Signature{.shape = {counts[i]}}));
    work->parts.push_back(std::make_shared<core::Work>());
  }
  core::RunItem item;
  item.key = core::Key::Named(core::kWorldSet, name);
  item.signature = std::make_shared<const core::Signature>(std::move(signature));
  if (has_work) item.work = std::move(work);
  return item;
}

Groups MakeAll(std::vector<core::RunItem> items) {
  core::RunBatch batch;
  batch.members = std::make_shared<const core::RankRanges>(core::RankRanges{0, 1});
  batch.limits = {.fusion_bytes = 400, .small_bytes = 100};
  batch.items = std::move(items);
  return MakeGroups(std::move(batch), {}, 0, core::TimePoint{});
}

TEST(MakeGroupsTest, CallsShareAGroupUnderTheirOwnNames) {
  core::RunItem one = CallOf("a", {1});
  core::RunItem many = CallOf("b", {2, 3});
  const core::HandlePtr a = one.work->handle;
  const core::HandlePtr b = many.work->handle;
  const Groups groups = MakeAll({std::move(one), std::move(many), CallOf("c", {4})});
  ASSERT_EQ(groups.size(), 1U);
  const GroupTask& group = *groups[0];
  ASSERT_EQ(group.items.size(), 4U);
  EXPECT_EQ(group.KeyOf(group.items[2]).name.text(), "b");
  EXPECT_EQ(group.KeyOf(group.items[3]).name.text(), "c");
  EXPECT_EQ(group.ToString(), "all-reduce of 4 tensors from \"a\" (small lane)");
  group.Complete(core::Status::Ok());
  EXPECT_TRUE(a->done());
  EXPECT_TRUE(b->done());
}

TEST(MakeGroupsTest, AGroupedCallIsDoneWithTheLastOfItsGroups) {
  core::RunItem call = CallOf("w", {90, 60, 40});
  const core::HandlePtr handle = call.work->handle;
  const Groups groups = MakeAll({std::move(call)});
  ASSERT_EQ(groups.size(), 2U);
  groups[1]->Complete(core::Status::Ok());
  EXPECT_FALSE(handle->done());
  groups[0]->Complete(core::Status::Ok());
  ASSERT_TRUE(handle->done());
  EXPECT_TRUE(handle->status().ok());
}

TEST(MakeGroupsTest, AGroupThatFailsFailsItsCalls) {
  core::RunItem call = CallOf("w", {90, 60, 40});
  const core::HandlePtr handle = call.work->handle;
  const Groups groups = MakeAll({std::move(call)});
  groups[0]->Complete({core::StatusCode::kBackend, "broken"});
  groups[1]->Complete(core::Status::Ok());
  ASSERT_TRUE(handle->done());
  EXPECT_EQ(handle->status().message(), "broken");
}

TEST(MakeGroupsTest, WhatNoRankHasIsCompleteAndInNoGroup) {
  core::RunItem single = CallOf("a", {1});
  single.absent = {true};
  core::RunItem bucket = CallOf("b", {1, 2});
  bucket.absent = {true, true};
  const core::HandlePtr handles[] = {single.work->handle, bucket.work->handle};
  EXPECT_TRUE(MakeAll({std::move(single), std::move(bucket)}).empty());
  for (const core::HandlePtr& handle : handles) {
    ASSERT_TRUE(handle->done());
    EXPECT_TRUE(handle->status().ok());
  }
}

TEST(MakeGroupsTest, ARankThatHasJoinedHasTheSameGroupsWithoutWork) {
  core::RunItem call = CallOf("w", {90, 60, 40}, /*has_work=*/false);
  call.silent = core::RankRanges{0};
  const Groups groups = MakeAll({std::move(call)});
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_TRUE(groups[0]->joined());
  EXPECT_EQ(groups[1]->silent, core::RankRanges{0});
  groups[0]->Complete(core::Status::Ok());
}

}  // namespace
}  // namespace sirtaki::ops
