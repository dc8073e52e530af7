#include "sirtaki/rank_zero_first.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct DiskFull : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(RankZeroFirstTest, TheFirstHasFinishedBeforeTheOthersBegin) {
  std::atomic<int> finished{0};
  RunTorchRanks(3, [&](int rank) {
    const int result = run_rank_zero_first(
        [&] {
          EXPECT_EQ(finished.load() == 0, rank == 0) << rank;
          return ++finished + 10;
        },
        RankZeroFirstOptions().name("data"));
    EXPECT_EQ(result == 11, rank == 0) << result;
    EXPECT_EQ(finished.load(), 3) << "nobody goes on before all have finished";
  });
}

TEST(RankZeroFirstTest, TakesFunctionsWithoutAResultAndResultsThatOnlyMove) {
  for (const int size : {1, 2}) {
    RunTorchRanks(size, [&](int rank) {
      bool ran = false;
      run_rank_zero_first([&] { ran = true; });
      EXPECT_TRUE(ran);
      const auto result = run_rank_zero_first([&] { return std::make_unique<int>(rank); });
      EXPECT_EQ(*result, rank);
    });
  }
}

// All threads are ranks of one host.
TEST(RankZeroFirstTest, TheFirstOfAHost) {
  std::atomic<int> finished{0};
  RunTorchRanks(2, [&](int rank) {
    run_rank_zero_first([&] { EXPECT_EQ(finished++ == 0, rank == 0); },
                        RankZeroFirstOptions().scope(FirstScope::Host));
  });
}

TEST(RankZeroFirstTest, WhatTheFirstThrowsIsToldAndTheOthersDoNotRun) {
  RunTorchRanks(3, [&](int rank) {
    const auto run = [&] {
      run_rank_zero_first(
          [&] {
            EXPECT_EQ(rank, 0);
            throw DiskFull("no space left");
          },
          RankZeroFirstOptions().name("download"));
    };
    if (rank == 0) {
      EXPECT_THROW(run(), DiskFull);
    } else {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, run),
                  AllOf(HasSubstr("run_rank_zero_first/download"), HasSubstr("no space left"),
                        HasSubstr("(on rank 0)")));
    }
    // The job goes on.
    EXPECT_EQ(run_rank_zero_first([] { return 5; }), 5);
  });
}

TEST(RankZeroFirstTest, WhatALaterOneThrowsIsToldToAll) {
  RunTorchRanks(3, [&](int rank) {
    const auto run = [&] {
      run_rank_zero_first([&] {
        if (rank == 1) throw DiskFull("no space left");
      });
    };
    if (rank == 1) {
      EXPECT_THROW(run(), DiskFull);
    } else {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, run),
                  AllOf(HasSubstr("no space left"), HasSubstr("(on rank 1)")));
    }
  });
}

TEST(RankZeroFirstTest, ExceptionsWithoutATextAreToldToo) {
  RunTorchRanks(2, [&](int rank) {
    const auto throw_number = [&] { run_rank_zero_first([] { throw 5; }); };
    const auto throw_empty = [&] { run_rank_zero_first([] { throw DiskFull(""); }); };
    if (rank == 0) {
      EXPECT_THROW(throw_number(), int);
      EXPECT_THROW(throw_empty(), DiskFull);
    } else {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, throw_number),
                  HasSubstr("an exception of unknown type"));
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, throw_empty),
                  HasSubstr("an exception without a text"));
    }
  });
}

TEST(RankZeroFirstTest, ScopesThatDifferAreRefused) {
  RunTorchRanks(2, [&](int rank) {
    const auto scope = rank == 0 ? FirstScope::Job : FirstScope::Host;
    EXPECT_THAT(
        ErrorOf(ErrorCode::Mismatch,
                [&] { run_rank_zero_first([] {}, RankZeroFirstOptions().scope(scope)); }),
        AllOf(HasSubstr("rank 0 on rank 0"), HasSubstr("the first rank of each host on rank 1")));
  });
}

}  // namespace
}  // namespace sirtaki::tests
