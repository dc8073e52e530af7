#include "sirtaki/process_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <latch>
#include <string>
#include <vector>

#include "frameworks/torch/session/set_membership.h"
#include "sirtaki/collectives.h"
#include "sirtaki/session.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

AllreduceOptions SumOn(const ProcessSet& set, const std::string& name = "") {
  return AllreduceOptions().name(name).op(ReduceOp::Sum).process_set(set);
}

float SumOfRanks(int rank, const ProcessSet& set) {
  return allreduce(torch::full({1}, rank, torch::kFloat), SumOn(set)).item<float>();
}

TEST(ProcessSetTest, ADefaultOneIsTheWorld) {
  RunTorchRanks(3, [](int rank) {
    const ProcessSet world;
    EXPECT_EQ(world.id(), 0u);
    EXPECT_EQ(world.rank(), rank);
    EXPECT_EQ(world.size(), 3);
    EXPECT_THAT(world.ranks(), ElementsAre(0, 1, 2));
    EXPECT_TRUE(world.included());
    const ProcessSet same = world_process_set();
    EXPECT_THAT(same.ranks(), ElementsAre(0, 1, 2));
    EXPECT_EQ(SumOfRanks(rank, same), 3);
  });
  ErrorOf(ErrorCode::NotInitialized, [] { ProcessSet().size(); });
}

TEST(ProcessSetTest, KnowsItsRanksOnEveryRank) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet odd = add_process_set({3, 1});
    EXPECT_NE(odd.id(), 0u);
    EXPECT_EQ(odd.size(), 2);
    EXPECT_THAT(odd.ranks(), ElementsAre(1, 3));
    EXPECT_EQ(odd.included(), rank % 2 == 1);
    EXPECT_EQ(odd.rank(), rank == 1 ? 0 : rank == 3 ? 1 : -1);
    const auto ids = allgather(torch::full({1}, static_cast<std::int64_t>(odd.id())));
    EXPECT_TRUE(torch::equal(ids, torch::full({4}, static_cast<std::int64_t>(odd.id()))));
  });
}

TEST(ProcessSetTest, CollectivesStayInTheirSets) {
  RunTorchRanks(4, [](int rank) {
    const ProcessSet low = add_process_set({0, 1});
    const ProcessSet high = add_process_set({2, 3});
    const ProcessSet& mine = rank < 2 ? low : high;
    for (int i = 0; i < 3; ++i) EXPECT_EQ(SumOfRanks(rank, mine), rank < 2 ? 1 : 5);
    // A root is a rank of the job.
    const auto got =
        broadcast(torch::full({1}, rank), rank < 2 ? 1 : 2, BroadcastOptions().process_set(mine));
    EXPECT_EQ(got.item<std::int64_t>(), rank < 2 ? 1 : 2);
    const auto average =
        allreduce(torch::full({1}, rank, torch::kDouble), AllreduceOptions().process_set(mine));
    EXPECT_EQ(average.item<double>(), rank < 2 ? 0.5 : 2.5);
  });
}

// Rank 1 comes late to one set; the other goes on.
TEST(ProcessSetTest, OverlappingSetsDoNotWaitForEachOther) {
  RunTorchRanks(3, [](int rank) {
    const ProcessSet low = add_process_set({0, 1});
    const ProcessSet high = add_process_set({1, 2});
    Handle waiting;
    if (rank == 0) waiting = allreduce_async(torch::ones({1}), SumOn(low, "x"));
    if (rank > 0) {
      for (int i = 0; i < 5; ++i) EXPECT_EQ(SumOfRanks(rank, high), 3);
    }
    barrier();
    if (rank == 0) {
      EXPECT_FALSE(poll(waiting));
    }
    barrier();
    if (rank == 1) waiting = allreduce_async(torch::ones({1}), SumOn(low, "x"));
    if (rank < 2) {
      EXPECT_EQ(synchronize(waiting).item<float>(), 2);
    }
  });
}

TEST(ProcessSetTest, TheSameNameInTwoSetsIsTwoCalls) {
  RunTorchRanks(2, [](int rank) {
    const ProcessSet set = add_process_set({0, 1});
    const Handle a = allreduce_async(torch::full({1}, rank + 1.0), SumOn({}, "x"));
    const Handle b = allreduce_async(torch::full({1}, rank + 2.0), SumOn(set, "x"));
    EXPECT_EQ(synchronize(a).item<double>(), 3);
    EXPECT_EQ(synchronize(b).item<double>(), 5);
  });
}

TEST(ProcessSetTest, LocalAndCrossAreThereFromTheStart) {
  RunTorchRanks(
      4,
      [](int rank) {
        const ProcessSet local = local_process_set();
        const ProcessSet cross = cross_process_set();
        EXPECT_EQ(local.ranks(), rank < 2 ? std::vector<int>({0, 1}) : std::vector<int>({2, 3}));
        EXPECT_EQ(cross.ranks(),
                  rank % 2 == 0 ? std::vector<int>({0, 2}) : std::vector<int>({1, 3}));
        EXPECT_EQ(local.rank(), local_rank());
        EXPECT_EQ(cross.rank(), cross_rank());
        EXPECT_EQ(SumOfRanks(rank, local), rank < 2 ? 1 : 5);
        EXPECT_EQ(SumOfRanks(rank, cross), rank % 2 == 0 ? 2 : 4);
      },
      {}, {0, 0, 1, 1});
}

TEST(ProcessSetTest, ARankOutsideIsToldAtOnce) {
  RunTorchRanks(3, [](int rank) {
    const ProcessSet set = add_process_set({0, 2});
    if (rank == 1) {
      const auto text = ErrorOf(ErrorCode::InvalidArgument,
                                [&] { allreduce(torch::ones({1}), SumOn(set, "w")); });
      EXPECT_THAT(text, AllOf(HasSubstr("rank 1 is not in"), HasSubstr("ranks 0, 2")));
      ErrorOf(ErrorCode::InvalidArgument, [&] { barrier(BarrierOptions().process_set(set)); });
      ErrorOf(ErrorCode::InvalidArgument, [&] { join(JoinOptions().process_set(set)); });
    } else {
      EXPECT_EQ(SumOfRanks(rank, set), 2);
    }
  });
}

TEST(ProcessSetTest, ARootOutsideTheSetIsRefusedOnEveryMember) {
  RunTorchRanks(3, [](int rank) {
    const ProcessSet set = add_process_set({0, 2});
    if (rank == 1) return;
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] {
      broadcast(torch::ones({1}), 1, BroadcastOptions().name("b").process_set(set));
    });
    EXPECT_THAT(text, AllOf(HasSubstr("root rank 1"), HasSubstr("0, 2")));
    EXPECT_EQ(SumOfRanks(rank, set), 2);
  });
}

TEST(ProcessSetTest, ARemovedOneIsNamed) {
  RunTorchRanks(2, [](int rank) {
    const ProcessSet set = add_process_set({0, 1});
    EXPECT_EQ(SumOfRanks(rank, set), 1);
    remove_process_set(set);
    const auto text =
        ErrorOf(ErrorCode::InvalidArgument, [&] { allreduce(torch::ones({1}), SumOn(set)); });
    EXPECT_THAT(text, AllOf(HasSubstr("process set " + std::to_string(set.id())),
                            HasSubstr("ranks 0-1"), HasSubstr("removed")));
    const ProcessSet next = add_process_set({0, 1});
    EXPECT_NE(next.id(), set.id());
    EXPECT_EQ(SumOfRanks(rank, next), 1);
  });
}

TEST(ProcessSetTest, WhatIsPendingInARemovedOneFails) {
  RunTorchRanks(2, [](int rank) {
    const ProcessSet set = add_process_set({0, 1});
    Handle pending;
    if (rank == 0) pending = allreduce_async(torch::ones({1}), SumOn(set, "x"));
    remove_process_set(set);
    if (rank == 0) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { synchronize(pending); }),
                  HasSubstr("\"x\""));
    }
  });
}

TEST(ProcessSetTest, WrongRanksAreRefusedOnEveryRank) {
  RunTorchRanks(3, [](int) {
    ErrorOf(ErrorCode::InvalidArgument, [&] { add_process_set({}); });
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          add_process_set({0, 3});
                        }),
                HasSubstr("0, 3"));
    ErrorOf(ErrorCode::InvalidArgument, [&] { add_process_set({-1, 0}); });
    EXPECT_EQ(add_process_set({2, 0}).size(), 2);
  });
}

TEST(ProcessSetTest, TheRanksMustAgree) {
  RunTorchRanks(3, [](int rank) {
    const auto text = ErrorOf(ErrorCode::Mismatch, [&] {
      add_process_set(rank == 1 ? std::vector<int>{0, 1} : std::vector<int>{0, 2});
    });
    EXPECT_THAT(text, AllOf(HasSubstr("0-1"), HasSubstr("0, 2"), HasSubstr("rank 1")));
    EXPECT_EQ(add_process_set({2, 0}).size(), 2);
  });
}

TEST(ProcessSetTest, TheWorldLocalAndCrossStay) {
  RunTorchRanks(2, [](int) {
    for (const auto& set : {ProcessSet(), local_process_set(), world_process_set()}) {
      ErrorOf(ErrorCode::InvalidArgument, [&] { remove_process_set(set); });
    }
  });
}

TEST(ProcessSetTest, OneOfAnotherSessionIsRefused) {
  std::vector<ProcessSet> sets(2);
  RunTorchRanks(2, [&](int rank) {
    sets[static_cast<std::size_t>(rank)] = add_process_set({0, 1});
  });
  RunTorchRanks(2, [&](int rank) {
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] {
      allreduce(torch::ones({1}), SumOn(sets[static_cast<std::size_t>(rank)]));
    });
    EXPECT_THAT(text, HasSubstr("made before shutdown()"));
  });
}

TEST(ProcessSetTest, OfOneRankIsThatRankAlone) {
  for (const int size : {1, 2}) {
    RunTorchRanks(size, [size](int rank) {
      const ProcessSet last = add_process_set({size - 1});
      if (last.included()) {
        EXPECT_EQ(SumOfRanks(rank, last), rank);
      }
      remove_process_set(last);
      EXPECT_THAT(local_process_set().size(), size);
      EXPECT_THAT(cross_process_set().size(), 1);
    });
  }
}

TEST(ProcessSetTest, MayBeNamedAtTheStart) {
  RunTorchRanks(3, [](int rank) {
    EXPECT_TRUE(initial_process_sets().empty());
    detail::AddInitialSets(InitOptions().process_set({0, 1}).process_set({1, 2}).process_sets(),
                           std::chrono::seconds(60), detail::CurrentSession());
    const auto sets = initial_process_sets();
    ASSERT_EQ(sets.size(), 2u);
    EXPECT_THAT(sets[0].ranks(), ElementsAre(0, 1));
    EXPECT_THAT(sets[1].ranks(), ElementsAre(1, 2));
    if (rank < 2) {
      EXPECT_EQ(SumOfRanks(rank, sets[0]), 1);
    }
    if (rank > 0) {
      EXPECT_EQ(SumOfRanks(rank, sets[1]), 3);
    }
  });
}

TEST(ProcessSetTest, ThoseOfTheStartMustAgree) {
  RunTorchRanks(2, [](int rank) {
    InitOptions options;
    options.process_set({0, 1});
    if (rank == 1) options.process_set({1});
    const auto text = ErrorOf(ErrorCode::Mismatch, [&] {
      detail::AddInitialSets(options.process_sets(), std::chrono::seconds(60),
                             detail::CurrentSession());
    });
    EXPECT_THAT(text, AllOf(HasSubstr("process sets of init()"), HasSubstr("rank 1")));
  });
}

// A rank that has started and never comes to them, with sets or without.
TEST(ProcessSetTest, ThoseOfTheStartAreNotWaitedForForEver) {
  for (const bool has_sets : {false, true}) {
    std::latch told(1);
    RunTorchRanks(2, [&](int rank) {
      if (rank == 1) {
        told.wait();
        return;
      }
      InitOptions options;
      if (has_sets) options.process_set({0, 1});
      const auto text = ErrorOf(ErrorCode::TimedOut, [&] {
        detail::AddInitialSets(options.process_sets(), std::chrono::milliseconds(200),
                               detail::CurrentSession());
      });
      EXPECT_THAT(text, AllOf(HasSubstr("process sets of init()"), HasSubstr("200 ms"),
                              HasSubstr("not submitted by rank 1")));
      told.count_down();
    });
  }
}

}  // namespace
}  // namespace sirtaki::tests
