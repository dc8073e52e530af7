// Every kind of collective through the lanes, among threads.
#include "ops/groups/group_run.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ops/host/host_lanes.h"
#include "ops/inproc/inproc_backend.h"
#include "tests/support/rank_threads.h"
#include "tests/support/run_cases.h"
#include "tests/support/shm_ranks.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::OpKind;
using core::RankRanges;
using core::ReduceOp;
using core::RunBatch;
using core::Signature;
using core::Status;
using tests::RankThreads;

struct Mode {
  int size;
  std::optional<tests::Seen> shared = std::nullopt;  // over shared memory
};

std::string NameOf(const ::testing::TestParamInfo<Mode>& mode) {
  return std::to_string(mode.param.size) + "Ranks" +
         (mode.param.shared ? "Seeing" + std::string(tests::SeenName(*mode.param.shared)) : "");
}

class GroupRunTest : public ::testing::TestWithParam<Mode> {
 protected:
  int size() const { return GetParam().size; }

  // All ranks run all batches, started at once, and compare every byte of every tensor.
  void Run(const std::vector<Cases>& batches) {
    InprocWorld world(size());
    tests::ShmRanks local(size(), GetParam().shared.value_or(tests::Seen::kAll));
    RankThreads::Run(size(), [&](int rank) {
      const std::unique_ptr<Backend> flat = world.Connect(rank);
      const auto shared = local.Connect(rank, *flat, {.spin = false});
      Backends& backend = GetParam().shared ? static_cast<Backends&>(shared->backend) : *flat;
      HostLanesOptions options{.rank = rank};
      options.on_failure = [](const Status& why, const std::string& key) {
        ADD_FAILURE() << key << ": " << why.ToString();
      };
      // All that is said is true of every kind of run.
      const auto observer = std::make_shared<core::trace::Observer>(std::size_t{1} << 14);
      observer->detail = true;
      options.observer = observer;
      HostLanes lanes(std::move(options), backend);
      std::vector<std::vector<RunSide>> sides;
      for (const Cases& cases : batches) sides.emplace_back(cases.size());
      for (std::size_t b = 0; b < batches.size(); ++b) {
        RunBatch batch = SmallBatch(size(), b);
        for (std::size_t i = 0; i < batches[b].size(); ++i) {
          batch.items.push_back(
              sides[b][i].MakeItem(batches[b][i], "t" + std::to_string(i), rank, size()));
        }
        lanes.Start(std::move(batch), core::Clock::now());
      }
      RunToIdle(lanes);
      for (std::size_t b = 0; b < batches.size(); ++b) {
        for (std::size_t i = 0; i < batches[b].size(); ++i) {
          sides[b][i].Check(batches[b][i], rank, size());
          parts_ += sides[b][i].has_part() ? 1 : 0;
        }
      }
      CheckPhases(*observer);
    });
  }

  // Those of a group follow each other, between its begin and its end.
  static void CheckPhases(const core::trace::Observer& observer) {
    using core::trace::EventKind;
    std::vector<core::trace::Event> events;
    std::uint64_t lost = 0;
    observer.recorder.Read(0, true, &events, &lost);
    std::map<std::uint64_t, core::TimePoint> reached;  // by group
    std::int64_t finished = 0;
    for (const core::trace::Event& event : events) {
      if (event.kind == EventKind::kQueue) continue;
      if (event.kind == EventKind::kBegin) {
        reached[event.number] = event.begin;
      } else if (const auto group = reached.find(event.number); group != reached.end()) {
        const bool is_end = event.kind == EventKind::kFinish;
        EXPECT_LE(event.begin, event.end);
        EXPECT_LE(group->second, is_end ? event.end : event.begin) << event.text();
        group->second = event.end;
        finished += is_end ? 1 : 0;
      }
    }
    if (lost > 0) return;
    const auto counted = observer.metrics.Read().kind_groups;  // barriers too
    EXPECT_EQ(finished, std::accumulate(counted.begin(), counted.end(), std::int64_t{0}));
  }

  // Each case in a batch of its own, and all of them in one.
  void RunAloneAndTogether(const Cases& cases) {
    std::vector<Cases> batches = {cases};
    for (const RunCase& c : cases) batches.push_back({c});
    Run(batches);
  }

  std::atomic<int> parts_{0};  // were brought to the ranks that keep them, by now
};

INSTANTIATE_TEST_SUITE_P(Modes, GroupRunTest,
                         ::testing::ValuesIn(tests::SampleOf<Mode>(::testing::Values(
                             Mode{1}, Mode{2}, Mode{3}, Mode{4}, Mode{5},
                             Mode{1, tests::Seen::kAll}, Mode{2, tests::Seen::kAll},
                             Mode{3, tests::Seen::kAll}, Mode{4, tests::Seen::kAll},
                             Mode{2, tests::Seen::kNothing}, Mode{3, tests::Seen::kNothing}))),
                         NameOf);

// The whole is reduced where one of the group is needed whole, or somebody has joined.
TEST_P(GroupRunTest, BringsToEachRankThePartThatItKeeps) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax}) {
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kC64}) {
      if (!core::IsDefined(op, dtype)) continue;
      Cases cases;
      for (RunCase c : ReducingCases(op, dtype, size())) {
        if (c.signature.kind != OpKind::kAllReduce || !c.joined.empty()) continue;
        c.in_parts = true;
        cases.push_back(c);
      }
      ASSERT_GT(cases.size(), 5U);
      const int before = parts_;
      RunAloneAndTogether(cases);
      // A port that reduces parts does so for half types after they were widened only.
      if (size() > 1 && !GetParam().shared) {
        EXPECT_EQ(parts_ > before, dtype != DType::kBF16) << core::DTypeName(dtype);
      }
      if (size() > 1) cases.back().absent = size() - 1;
      Run({cases, {cases.back()}});
      cases.back().absent = -1;
      cases.front().in_parts = false;
      Run({cases});
      for (RunCase& c : cases) c.joined = RankRanges{0};
      if (size() > 1) Run({cases, {cases.back()}});
    }
  }
}

bool Exact(ReduceOp op) { return op != ReduceOp::kAdasum; }

TEST_P(GroupRunTest, ReducesWithEveryOperationInEveryType) {
  std::vector<Cases> batches;
  for (int d = 0; d < core::kDTypeCount; ++d) {
    for (int o = 0; o < core::kReduceOpCount; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!core::IsDefined(op, dtype) || !Exact(op)) continue;
      batches.push_back(ReducingCases(op, dtype, size()));
      // Alone, and so with a group of its own.
      for (std::size_t i = 0; i < batches.back().size(); i += 7) {
        batches.push_back({batches.back()[i]});
      }
    }
  }
  Run(batches);
}

TEST_P(GroupRunTest, ReduceScatterOfFewRowsLeavesSomeMembersWithNone) {
  Cases cases;
  for (const std::int64_t rows : {1, 2, 3, 4, 6, 11}) {
    for (const std::int64_t row : {1, 90}) {
      cases.push_back({.signature = {.kind = OpKind::kReduceScatter,
                                     .dtype = DType::kI32,
                                     .shape = {rows, row}},
                       .seed = 40 + cases.size()});
    }
  }
  RunAloneAndTogether(cases);
}

TEST_P(GroupRunTest, ScalesOnTheWay) {
  Cases cases;
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64, DType::kU8,
                            DType::kI8, DType::kI16, DType::kI32, DType::kI64}) {
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct,
          ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor}) {
      if (!core::IsDefined(op, dtype)) continue;
      for (RunCase c : ReducingCases(op, dtype, size())) {
        c.signature.prescale = -0.5;
        c.signature.postscale = 4;
        cases.push_back(c);
      }
    }
  }
  Run({cases});
}

// The identity of a minimum or a product is not what it is after it was scaled.
TEST_P(GroupRunTest, WhoHasNoGradientGivesTheIdentity) {
  if (size() == 1) GTEST_SKIP() << "of one rank nobody has it";
  Cases cases;
  for (int d = 0; d < core::kDTypeCount; ++d) {
    for (int o = 0; o < core::kReduceOpCount; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!core::IsDefined(op, dtype) || !Exact(op)) continue;
      for (const double factor : {1.0, -2.0}) {
        if (factor != 1.0 && !core::IsFloating(dtype) && !core::IsInteger(dtype)) continue;
        for (RunCase c : ReducingCases(op, dtype, size())) {
          c.absent = (d + o) % size();
          c.signature.prescale = factor;
          cases.push_back(c);
        }
      }
    }
  }
  Run({cases});
}

TEST_P(GroupRunTest, MovesEveryType) {
  std::vector<Cases> batches;
  for (int d = 0; d < core::kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    Cases cases;
    for (const std::int64_t count : {0, 1, 7, 33, 700}) {
      for (const bool in_place : {false, true}) {
        cases.push_back({.signature = {.kind = OpKind::kBroadcast,
                                       .dtype = dtype,
                                       .root = d % size(),
                                       .shape = {count}},
                         .in_place = in_place,
                         .seed = 1 + cases.size()});
      }
      cases.push_back(
          {.signature = {.kind = OpKind::kAllGatherInto, .dtype = dtype, .shape = {count}},
           .seed = 60 + cases.size()});
    }
    for (const OpKind kind :
         {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
      const int root = core::HasRoot(kind) ? (d + 1) % size() : -1;
      for (const RunCase& c : CasesWithRows(kind, dtype, root, size())) cases.push_back(c);
    }
    batches.push_back(cases);
  }
  Run(batches);
}

TEST_P(GroupRunTest, EveryRootServes) {
  for (int root = 0; root < size(); ++root) {
    Cases cases;
    for (const OpKind kind : {OpKind::kGather, OpKind::kScatter}) {
      for (const RunCase& c : CasesWithRows(kind, DType::kF32, root, size())) cases.push_back(c);
    }
    RunAloneAndTogether(cases);
  }
}

TEST_P(GroupRunTest, ABarrierMovesNothing) {
  Run({{{.signature = {.kind = OpKind::kBarrier}}, {.signature = {.kind = OpKind::kBarrier}}}});
}

// Who has joined has no tensors, and the others get all the same what they have to get.
TEST_P(GroupRunTest, JoinedRanksTakePartWithoutTensors) {
  if (size() == 1) GTEST_SKIP() << "somebody has to be left";
  std::vector<RankRanges> choices = {RankRanges{size() - 1}, RankRanges{0}};
  if (size() > 3) choices.push_back(RankRanges{1, 3});
  for (const RankRanges& joined : choices) {
    int root = 0;
    while (joined.Contains(root)) ++root;
    std::vector<Cases> batches;
    for (const DType dtype : {DType::kF16, DType::kF32, DType::kC64, DType::kU8}) {
      for (int o = 0; o < core::kReduceOpCount; ++o) {
        const auto op = static_cast<ReduceOp>(o);
        if (!core::IsDefined(op, dtype) || !Exact(op)) continue;
        for (const double factor : {1.0, -2.0}) {
          if (factor != 1.0 && !core::IsFloating(dtype)) continue;
          batches.push_back(ReducingCases(op, dtype, size()));
          for (RunCase& c : batches.back()) {
            if (c.signature.root >= 0) c.signature.root = root;
            c.signature.prescale = factor;
          }
        }
      }
      Cases cases;
      for (const std::int64_t count : {0, 5, 700}) {
        cases.push_back(
            {.signature = {.kind = OpKind::kAllGatherInto, .dtype = dtype, .shape = {count}}});
        cases.push_back(
            {.signature = {
                 .kind = OpKind::kBroadcast, .dtype = dtype, .root = root, .shape = {count}}});
      }
      for (const OpKind kind :
           {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
        for (const RunCase& c :
             CasesWithRows(kind, dtype, core::HasRoot(kind) ? root : -1, size())) {
          cases.push_back(c);
        }
      }
      cases.push_back({.signature = {.kind = OpKind::kBarrier}});
      batches.push_back(cases);
    }
    for (Cases& cases : batches) {
      for (RunCase& c : cases) c.joined = joined;
    }
    Run(batches);
  }
}

TEST_P(GroupRunTest, RunsRandomBatches) {
  std::mt19937_64 random(tests::TestSeed());
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int rounds = tests::ScaledCount(6, 300);
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    std::vector<Cases> batches(static_cast<std::size_t>(1 + below(5)));
    for (Cases& cases : batches) {
      cases.resize(static_cast<std::size_t>(below(16)));
      for (RunCase& c : cases) {
        Signature& s = c.signature;
        c.seed = random();
        s.kind = static_cast<OpKind>(below(static_cast<int>(OpKind::kBarrier) + 1));
        s.dtype = static_cast<DType>(below(core::kDTypeCount));
        if (core::Reduces(s.kind)) {
          do {
            s.dtype = static_cast<DType>(below(core::kDTypeCount));
            s.reduction = static_cast<ReduceOp>(below(core::kReduceOpCount - 1));
          } while (!core::IsDefined(s.reduction, s.dtype));
        }
        c.in_place = below(2) == 0 && (s.kind == OpKind::kAllReduce || s.kind == OpKind::kReduce ||
                                       s.kind == OpKind::kBroadcast);
        if (below(4) == 0 && size() > 1) c.joined = RankRanges{below(size())};
        if (core::HasRoot(s.kind)) {
          do {
            s.root = below(size());
          } while (c.joined.Contains(s.root));
        }
        s.shape = {below(3) == 0 ? below(3) : below(600)};
        if (s.kind == OpKind::kReduceScatter) s.shape.push_back(below(4));
        if (!core::FirstDimensionVaries(s.kind)) continue;
        s.shape = {below(12)};
        for (int r = 0; r < size(); ++r) {
          c.rows.push_back(s.kind == OpKind::kAllToAll ? size() * below(9) : below(40));
        }
        if (below(2) == 0) continue;
        for (int r = 0; r < size(); ++r) {
          c.splits.push_back(UnequalSplits(c.rows[static_cast<std::size_t>(r)], r, size()));
        }
      }
    }
    Run(batches);
  }
}

// A set of one in a world of several: everything works, whatever the others do.
TEST_P(GroupRunTest, ASetOfOneMemberNeedsNobody) {
  constexpr core::SetNumber kSet = 7;
  const int alone = size() - 1;
  InprocWorld world(size());
  RankThreads::Run(size(), [&](int rank) {
    if (rank != alone) return;
    const std::unique_ptr<Backend> backend = world.Connect(rank);
    ASSERT_TRUE(backend->AddSet(kSet, RankRanges::Single(rank)).ok());
    HostLanesOptions options{.rank = rank};
    HostLanes lanes(std::move(options), *backend);
    Cases cases;
    for (const std::int64_t count : {0, 5, 700}) {
      for (const OpKind kind :
           {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGatherInto}) {
        cases.push_back({.signature = {.kind = kind, .shape = {count}}, .seed = 2});
      }
      for (const OpKind kind : {OpKind::kAllGather, OpKind::kAllToAll}) {
        cases.push_back({.signature = {.kind = kind, .shape = {3}}, .seed = 3, .rows = {count}});
      }
      cases.push_back({.signature = {.reduction = ReduceOp::kAdasum, .shape = {count}}, .seed = 4});
    }
    std::vector<RunSide> sides(cases.size());
    RunBatch batch = SmallBatch(1);
    batch.set = kSet;
    batch.members = std::make_shared<const RankRanges>(RankRanges::Single(rank));
    for (std::size_t i = 0; i < cases.size(); ++i) {
      // The batch is that of the only rank of a world of one.
      batch.items.push_back(sides[i].MakeItem(cases[i], std::to_string(i), 0, 1));
    }
    lanes.Start(std::move(batch), core::Clock::now());
    RunToIdle(lanes);
    for (std::size_t i = 0; i < cases.size(); ++i) sides[i].Check(cases[i], 0, 1);
  });
}

}  // namespace
}  // namespace sirtaki::ops
