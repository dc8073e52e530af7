// What goes wrong in a group, and what its ranks are told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/host/host_lanes.h"
#include "ops/inproc/inproc_backend.h"
#include "tests/support/rank_threads.h"
#include "tests/support/run_cases.h"

namespace sirtaki::ops {
namespace {

using core::OpKind;
using core::RankRanges;
using core::RunBatch;
using core::Status;
using tests::RankThreads;

// What failed is forgotten before its handles are told.
void AwaitTelling(const RunSide& side) {
  while (!side.handle()->done()) std::this_thread::yield();
}

// The status that each rank gets of one item, which `spoil` has changed.
std::vector<Status> Spoiled(int size, const RunCase& c,
                            const std::function<void(int rank, core::RunItem&)>& spoil) {
  std::vector<Status> statuses(static_cast<std::size_t>(size));
  InprocWorld world(size);
  RankThreads::Run(size, [&](int rank) {
    const std::unique_ptr<Backend> backend = world.Connect(rank);
    HostLanes lanes({.rank = rank}, *backend);
    RunSide side;
    RunBatch batch = SmallBatch(size);
    batch.items.push_back(side.MakeItem(c, "w", rank, size));
    spoil(rank, batch.items.front());
    lanes.Start(std::move(batch), core::Clock::now());
    RunToIdle(lanes);
    AwaitTelling(side);
    statuses[static_cast<std::size_t>(rank)] = side.handle()->status();
  });
  return statuses;
}

// All fail; who sees it first aborts the others.
void ExpectSomebodySays(const std::vector<Status>& statuses, const std::string& text) {
  std::string all;
  for (const Status& status : statuses) {
    EXPECT_FALSE(status.ok());
    all += status.ToString() + "\n";
  }
  EXPECT_THAT(all, ::testing::HasSubstr(text));
}

TEST(GroupRunFailureTest, RowsThatMakeNoSenseAreAFailureThatSaysWhose) {
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter}) {
    RunCase c{.signature = {.kind = kind, .shape = {4}}, .rows = {2, 2}};
    if (core::HasRoot(kind)) c.signature.root = 1;
    const std::vector<Status> statuses = Spoiled(2, c, [&](int rank, core::RunItem& item) {
      if (rank == 1) item.work->rows = -6;
    });
    ExpectSomebodySays(statuses, "\"w\" are impossible: ");
  }
  const RunCase c{.signature = {.kind = OpKind::kAllToAll, .shape = {4}}, .rows = {2, 2}};
  const std::int64_t huge = std::int64_t{1} << 60;
  for (const std::vector<std::int64_t>& splits :
       {std::vector<std::int64_t>{-1, 3}, std::vector<std::int64_t>{huge, huge}}) {
    const std::vector<Status> statuses = Spoiled(2, c, [&](int rank, core::RunItem& item) {
      if (rank == 0) item.work->splits = splits;
    });
    ExpectSomebodySays(statuses, std::to_string(splits[0]) + " rows of member ");
  }
}

TEST(GroupRunFailureTest, NoMemoryForWhatArrivesIsAFailure) {
  for (const OpKind kind :
       {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
    RunCase c{.signature = {.kind = kind, .shape = {4}}, .rows = {2, 2}};
    if (core::HasRoot(kind)) c.signature.root = 0;
    const std::vector<Status> statuses = Spoiled(2, c, [](int rank, core::RunItem& item) {
      if (rank == 0) item.work->allocate_output = [](const auto&) -> void* { return nullptr; };
    });
    EXPECT_THAT(statuses[0].message(),
                ::testing::HasSubstr("out of memory for the result of \"w\""));
    EXPECT_FALSE(statuses[1].ok());
  }
}

TEST(GroupRunFailureTest, ARootThatHasJoinedIsAFailure) {
  for (const OpKind kind :
       {OpKind::kBroadcast, OpKind::kReduce, OpKind::kGather, OpKind::kScatter}) {
    const RunCase c{.signature = {.kind = kind, .root = 1, .shape = {4}},
                    .rows = {2, 2},
                    .joined = RankRanges{1}};
    InprocWorld world(2);
    const std::unique_ptr<Backend> backend = world.Connect(0);
    HostLanes lanes({.rank = 0}, *backend);
    RunSide side;
    RunBatch batch = SmallBatch(2);
    batch.items.push_back(side.MakeItem(c, "w", 0, 2));
    lanes.Start(std::move(batch), core::Clock::now());
    RunToIdle(lanes);
    AwaitTelling(side);
    EXPECT_THAT(side.handle()->status().message(), ::testing::HasSubstr("the root has joined"));
  }
}

TEST(GroupRunFailureTest, WhatBelongsInNoLaneIsRefused) {
  for (const OpKind kind : {OpKind::kMakeArena, OpKind::kSend}) {
    const RunCase c{.signature = {.kind = kind, .shape = {1}}};
    const std::vector<Status> statuses = Spoiled(1, c, [](int, core::RunItem&) {});
    EXPECT_THAT(statuses[0].message(), ::testing::HasSubstr("no place in a lane"));
  }
}

}  // namespace
}  // namespace sirtaki::ops
