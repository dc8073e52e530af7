#include "sirtaki/barrier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <string>

#include "sirtaki/collectives.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;

TEST(BarrierTest, NobodyPassesBeforeAllHaveCome) {
  std::atomic<int> come{0};
  RunTorchRanks(4, [&](int) {
    for (int round = 1; round <= 20; ++round) {
      ++come;
      barrier();
      EXPECT_GE(come.load(), 4 * round);
      const Handle handle = barrier_async(BarrierOptions().name("b"));
      EXPECT_FALSE(synchronize(handle).defined());
    }
  });
}

TEST(BarrierTest, AMonitoredOneNamesWhoIsMissing) {
  RunTorchRanks(3, [](int rank) {
    monitored_barrier(std::chrono::seconds(60));
    const auto text = ErrorOf(ErrorCode::TimedOut, [&] {
      if (rank == 2) {
        // Until the others' barrier has failed it.
        allreduce(torch::ones({1}), AllreduceOptions().name("elsewhere"));
      } else {
        monitored_barrier(milliseconds(5000), BarrierOptions().name("meet"));
      }
    });
    EXPECT_THAT(text, AllOf(HasSubstr("\"meet\""), HasSubstr("rank 2")));
  });
}

TEST(BarrierTest, AMonitoredOneNeedsATimeout) {
  RunTorchRanks(2, [](int) {
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { monitored_barrier(milliseconds(0)); }),
                HasSubstr("timeout above zero"));
  });
}

// Rank r has 2 + 3 r batches.
TEST(JoinTest, UnevenLoopsEnd) {
  for (const int size : {1, 2, 3, 4}) {
    RunTorchRanks(size, [size](int rank) {
      for (int epoch = 0; epoch < 2; ++epoch) {
        const int batches = 2 + 3 * rank;
        for (int batch = 0; batch < batches; ++batch) {
          int busy = 0;
          for (int r = 0; r < size; ++r) busy += batch < 2 + 3 * r ? 1 : 0;
          const auto sum = AllreduceOptions().op(ReduceOp::Sum);
          EXPECT_EQ(allreduce(torch::ones({3}), sum)[0].item<float>(), busy);
          EXPECT_EQ(allreduce(torch::ones({3}), AllreduceOptions().name("w"))[0].item<float>(),
                    static_cast<float>(busy) / static_cast<float>(size));
          EXPECT_EQ(allreduce(torch::full({1}, 5), AllreduceOptions().op(ReduceOp::Min))
                        .item<std::int64_t>(),
                    5);
          EXPECT_EQ(allgather(torch::full({1, 2}, rank)).size(0), busy);
          grouped_allreduce({torch::ones({2}), torch::ones({1})});
          barrier();
        }
        EXPECT_EQ(join(), size - 1);
      }
      const auto all = allreduce(torch::ones({1}), AllreduceOptions().op(ReduceOp::Sum));
      EXPECT_EQ(all.item<float>(), size);
    });
  }
}

TEST(JoinTest, ARootThatHasJoinedIsAnError) {
  RunTorchRanks(2, [](int rank) {
    if (rank == 1) {
      const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] {
        broadcast(torch::ones({1}), 0, BroadcastOptions().name("b"));
      });
      EXPECT_THAT(text, AllOf(HasSubstr("\"b\""), HasSubstr("rank 0"), HasSubstr("joined")));
    }
    EXPECT_EQ(join(), 1);
  });
}

TEST(JoinTest, OfASetLeavesTheWorldAlone) {
  RunTorchRanks(3, [](int rank) {
    const ProcessSet set = add_process_set({0, 1});
    const auto on_set = AllreduceOptions().op(ReduceOp::Sum).process_set(set);
    if (rank == 1) {
      EXPECT_EQ(allreduce(torch::ones({1}), on_set).item<float>(), 1);
    }
    if (rank < 2) {
      EXPECT_EQ(join(JoinOptions().process_set(set)), 1);
    }
    const auto all = allreduce(torch::ones({1}), AllreduceOptions().op(ReduceOp::Sum));
    EXPECT_EQ(all.item<float>(), 3);
  });
}

}  // namespace
}  // namespace sirtaki::tests
