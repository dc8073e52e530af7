#include "session/single/single_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/run_cases.h"

namespace sirtaki::session {
namespace {

using core::DType;
using core::OpKind;
using core::ReduceOp;
using core::Status;
using ops::RunCase;
using ops::RunSide;

Devices& NoDevices() {
  static Devices devices{GpuLibraries::OfProcess()};
  return devices;
}

Status RunItem(const core::RunItem& item) {
  item.work->request.key = item.key;
  item.work->request.asked = item.signature;
  Status status = RunInSingleProcess(*item.work, NoDevices());
  item.work->handle->Complete(status);
  return status;
}

void ExpectRight(const RunCase& c) {
  RunSide side;
  EXPECT_TRUE(RunItem(side.MakeItem(c, "w", 0, 1)).ok()) << c.ToString();
  side.Check(c, 0, 1);
}

TEST(SingleProcessTest, EveryKindMovesToItself) {
  for (int d = 0; d < core::kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (const std::int64_t count : {0, 1, 1500}) {
      for (const OpKind kind : {OpKind::kBroadcast, OpKind::kAllGatherInto}) {
        ExpectRight({.signature = {.kind = kind, .dtype = dtype, .root = 0, .shape = {count}}});
      }
      for (const OpKind kind :
           {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
        ExpectRight({.signature = {.kind = kind, .dtype = dtype, .root = 0, .shape = {3}},
                     .rows = {count}});
      }
    }
  }
  ExpectRight({.signature = {.kind = OpKind::kBarrier}});
}

TEST(SingleProcessTest, EveryReductionOfOneIsTheTensorScaled) {
  for (int d = 0; d < core::kDTypeCount; ++d) {
    for (int o = 0; o < core::kReduceOpCount; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!core::IsDefined(op, dtype)) continue;
      for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter}) {
        for (const bool in_place : {false, true}) {
          RunCase c{.signature = {.kind = kind, .reduction = op, .dtype = dtype, .shape = {9, 2}},
                    .in_place = in_place};
          if (core::HasRoot(kind)) c.signature.root = 0;
          ExpectRight(c);
          if (!core::IsFloating(dtype) && !core::IsInteger(dtype)) continue;
          c.signature.prescale = 0.5;
          c.signature.postscale = -4;
          ExpectRight(c);
        }
      }
    }
  }
}

TEST(SingleProcessTest, AGroupedCallMovesAllItsParts) {
  const std::vector<RunCase> cases = {
      {.signature = {.kind = OpKind::kAllToAll, .shape = {3}}, .seed = 1, .rows = {4}},
      {.signature = {.kind = OpKind::kAllToAll, .dtype = DType::kU8, .shape = {}},
       .seed = 2,
       .rows = {0}},
      {.signature = {.kind = OpKind::kAllToAll, .dtype = DType::kC64, .shape = {2, 2}},
       .seed = 3,
       .rows = {1}}};
  std::vector<RunSide> sides(cases.size());
  auto whole = std::make_shared<core::Signature>();
  whole->kind = OpKind::kAllToAll;
  core::Work work;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const core::RunItem item = sides[i].MakeItem(cases[i], "w", 0, 1);
    whole->parts.push_back(item.signature);
    work.parts.push_back(item.work);
  }
  work.request.key = core::Key::Named(core::kWorldSet, "w");
  work.request.asked = whole;
  EXPECT_TRUE(RunInSingleProcess(work, NoDevices()).ok());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    sides[i].handle()->Complete(Status::Ok());
    sides[i].Check(cases[i], 0, 1);
  }

  work.parts.erase(work.parts.begin(), work.parts.begin() + 2);
  whole->parts.erase(whole->parts.begin(), whole->parts.begin() + 2);
  work.parts[0]->allocate_output = [](const auto&) -> void* {
    throw std::runtime_error("the pool is empty");
  };
  const Status status = RunInSingleProcess(work, NoDevices());
  EXPECT_EQ(status.code(), core::StatusCode::kBackend);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("\"w\": the pool is empty"));
}

TEST(SingleProcessTest, WhatNeedsMoreThanOneIsRefused) {
  const RunCase c{.signature = {.kind = OpKind::kSend, .shape = {1}}};
  RunSide side;
  const Status status = RunItem(side.MakeItem(c, "w", 0, 1));
  EXPECT_EQ(status.code(), core::StatusCode::kUnsupported);
  EXPECT_EQ(status.message(), "send is not supported in a world of one rank");
}

}  // namespace
}  // namespace sirtaki::session
