// What a handle's own functions do. Those of its older, free functions are tested with each operation.
#include "sirtaki/handle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <future>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sirtaki/collectives.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::HasSubstr;

AllreduceOptions SumOf(const std::string& name) {
  return AllreduceOptions().name(name).op(ReduceOp::Sum);
}

// Fails where nothing comes, instead of waiting for ever.
template <class Value>
Value Soon(std::future<Value> future) {
  if (future.wait_for(std::chrono::seconds(60)) != std::future_status::ready) {
    throw std::runtime_error("no callback came");
  }
  return future.get();
}

TEST(HandleMembersTest, WaitsAndGivesItsResult) {
  RunTorchRanks(2, [](int rank) {
    const Handle handle = allreduce_async(torch::full({2}, rank + 1.0), SumOf("t"));
    handle.wait();
    EXPECT_TRUE(handle.done());
    EXPECT_EQ(handle.result()[0].item<double>(), 3);
    const GroupedHandle group =
        grouped_allreduce_async({torch::ones({2}), torch::ones({3})}, SumOf("group"));
    group.wait();
    EXPECT_TRUE(group.done());
    EXPECT_EQ(group.results()[1].sum().item<double>(), 6);
  });
  ErrorOf(ErrorCode::InvalidArgument, [] { Handle().wait(); });
  ErrorOf(ErrorCode::InvalidArgument, [] { Handle().then([](const Handle&) {}); });
}

TEST(HandleMembersTest, ThenCallsBackOnAThreadOfTheLibrary) {
  RunTorchRanks(2, [](int rank) {
    std::promise<std::pair<double, std::thread::id>> told;
    const Handle handle = allreduce_async(torch::full({2}, rank + 1.0), SumOf("t"));
    handle.then([&told](const Handle& ended) {
      EXPECT_TRUE(ended.done());
      told.set_value({ended.result()[0].item<double>(), std::this_thread::get_id()});
    });
    const auto [value, thread] = Soon(told.get_future());
    EXPECT_EQ(value, 3);
    EXPECT_NE(thread, std::this_thread::get_id());
    // An operation that has ended calls back as well, as often as it is asked to.
    std::promise<std::thread::id> again;
    handle.then([&again](const Handle&) { again.set_value(std::this_thread::get_id()); });
    EXPECT_NE(Soon(again.get_future()), std::this_thread::get_id());
  });
}

TEST(HandleMembersTest, ACallbackMayStartOperationsAndChainThem) {
  RunTorchRanks(2, [](int rank) {
    std::promise<double> told;
    allreduce_async(torch::full({1}, rank + 1.0), SumOf("first")).then([&](const Handle& first) {
      grouped_allreduce_async({first.result(), torch::ones({1})}, SumOf("second"))
          .then([&](const GroupedHandle& second) {
            told.set_value(second.results()[0].item<double>());
          });
    });
    EXPECT_EQ(Soon(told.get_future()), 6);
  });
}

// Each rank makes the second operation's call in the callback of one that ends while another waits.
TEST(HandleMembersTest, ACallbackDoesNotWaitForOtherOperations) {
  RunTorchRanks(2, [](int rank) {
    std::promise<double> told;
    Handle late;
    if (rank == 0) {
      late = allreduce_async(torch::ones({1}), SumOf("late"));
      late.then([](const Handle&) {});
    }
    allreduce_async(torch::ones({1}), SumOf("early")).then([&](const Handle&) {
      told.set_value(allreduce(torch::ones({1}), SumOf("inner")).item<double>());
    });
    EXPECT_EQ(Soon(told.get_future()), 2);
    if (rank == 1) late = allreduce_async(torch::ones({1}), SumOf("late"));
    EXPECT_EQ(late.result().item<double>(), 2);
  });
}

TEST(HandleMembersTest, OperationsWaitForTheirEndWithoutAThreadEach) {
  constexpr int kMany = 200;
  const auto threads = [] {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return std::distance(begin(tasks), end(tasks));
  };
  RunTorchRanks(2, [&threads](int rank) {
    std::promise<void> all;
    std::atomic<int> left = kMany;
    const auto start = [&](int i) {
      allreduce_async(torch::ones({1}), SumOf("t" + std::to_string(i)))
          .then([&](const Handle& ended) {
            EXPECT_EQ(ended.result().item<double>(), 2);
            if (--left == 0) all.set_value();
          });
    };
    if (rank == 0) {
      const auto before = threads();
      for (int i = 0; i < kMany; ++i) start(i);
      EXPECT_LT(threads(), before + kMany / 2);
    }
    barrier();
    if (rank == 1) {
      for (int i = 0; i < kMany; ++i) start(i);
    }
    Soon(all.get_future());
  });
}

TEST(HandleMembersTest, ThenIsCalledForWhatFails) {
  RunTorchRanks(2, [](int rank) {
    std::promise<std::string> told;
    allreduce_async(torch::ones({2 + rank}), SumOf("t")).then([&told](const Handle& h) {
      told.set_value(ErrorOf(ErrorCode::Mismatch, [&h] { h.wait(); }));
    });
    EXPECT_THAT(Soon(told.get_future()), HasSubstr("\"t\""));
  });
}

TEST(HandleMembersTest, SparseOperationsAndBarriersCallBackToo) {
  RunTorchRanks(2, [](int rank) {
    const auto mine =
        torch::sparse_coo_tensor(torch::tensor({{rank}}), torch::ones({1, 2}), {8, 2});
    std::promise<std::int64_t> elements;
    sparse_allreduce_async(mine, SumOf("sparse")).then([&elements](const Handle& ended) {
      elements.set_value(ended.result()._nnz());
    });
    EXPECT_EQ(Soon(elements.get_future()), 2);
    std::promise<bool> undefined;
    barrier_async().then(
        [&undefined](const Handle& ended) { undefined.set_value(!ended.result().defined()); });
    EXPECT_TRUE(Soon(undefined.get_future()));
  });
}

TEST(HandleMembersTest, ACallbackThatThrowsEndsTheJob) {
  RunTorchRanks(2, [](int rank) {
    const Handle handle = allreduce_async(torch::ones({2}), SumOf("t"));
    if (rank == 0) handle.then([](const Handle&) { throw std::runtime_error("disk full"); });
    EXPECT_THAT(ErrorOf(ErrorCode::Aborted,
                        [&] {
                          handle.wait();
                          // A rank alone, which waits until the job has ended.
                          allreduce(torch::ones({2}), SumOf("of rank " + std::to_string(rank)));
                        }),
                HasSubstr("disk full"));
  });
}

TEST(HandleMembersTest, ThenRefusesTheHandleOfASessionThatHasEnded) {
  Handle handle;
  RunTorchRanks(1, [&handle](int) {
    handle = allreduce_async(torch::ones({2}), SumOf("t"));
    handle.wait();
  });
  ErrorOf(ErrorCode::NotInitialized, [&handle] { handle.then([](const Handle&) {}); });
}

}  // namespace
}  // namespace sirtaki::tests
