#include "sirtaki/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <vector>

#include "sirtaki/collectives.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

MessageOptions Tag(int tag) { return MessageOptions().tag(tag); }

TEST(MessageTest, ArriveInTheOrderOfTheirTag) {
  RunTorchRanks(2, [](int rank) {
    if (rank == 0) {
      // A send may wait for its receive, and these come in another order.
      std::vector<Handle> sends;
      for (int i = 0; i < 4; ++i) {
        sends.push_back(isend(torch::full({2}, i), 1, Tag(i % 2)));
      }
      for (const Handle& handle : sends) synchronize(handle);
      return;
    }
    auto got = torch::empty({2}, torch::kLong);
    for (const int value : {1, 0, 3, 2}) {
      EXPECT_TRUE(recv_(got, 0, Tag(value % 2)).is_same(got));
      EXPECT_TRUE(torch::equal(got, torch::full({2}, value))) << got;
    }
  });
}

TEST(MessageTest, GoAroundARing) {
  for (const int size : {1, 2, 3, 4}) {
    RunTorchRanks(size, [size](int rank) {
      auto got = torch::empty({3, 2}).t();  // not flat
      const Handle receiving = irecv(got, (rank + size - 1) % size);
      const Handle sending = isend(torch::full({2, 3}, rank * 1.0f), (rank + 1) % size);
      EXPECT_TRUE(synchronize(receiving).is_same(got));
      synchronize(sending);
      EXPECT_TRUE(torch::equal(got, torch::full({2, 3}, (rank + size - 1) % size * 1.0f)));
    });
  }
}

TEST(MessageTest, ABatchMayCrossItself) {
  RunTorchRanks(3, [](int rank) {
    std::vector<P2POp> operations;
    std::vector<torch::Tensor> got(3);
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      got[static_cast<std::size_t>(peer)] = torch::empty({1}, torch::kLong);
      operations.push_back(P2POp::send(torch::full({1}, 10 * rank + peer), peer, 7));
      operations.push_back(P2POp::receive(got[static_cast<std::size_t>(peer)], peer, 7));
    }
    for (const Handle& handle : batch_isend_irecv(operations)) synchronize(handle);
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      EXPECT_EQ(got[static_cast<std::size_t>(peer)].item<std::int64_t>(), 10 * peer + rank);
    }
  });
}

TEST(MessageTest, TheReceiverIsToldOfAnotherTypeOrShape) {
  RunTorchRanks(2, [](int rank) {
    if (rank == 0) {
      send(torch::ones({2, 3}), 1);
      send(torch::ones({2}, torch::kInt), 1);
      send(torch::ones({2}), 1);
      return;
    }
    auto into = torch::zeros({2});
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { recv_(into, 0); }),
                AllOf(HasSubstr("[2, 3]"), HasSubstr("[2]"), HasSubstr("rank 0")));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { recv_(into, 0); }),
                AllOf(HasSubstr("int32"), HasSubstr("float32")));
    EXPECT_TRUE(torch::equal(recv_(into, 0), torch::ones({2})));
  });
}

TEST(MessageTest, WhatCannotBeIsRefusedAtOnce) {
  RunTorchRanks(2, [](int) {
    const auto refused = [&](const std::function<void()>& call, const std::string& words) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, call), HasSubstr(words));
    };
    const auto t = torch::ones({2});
    refused([&] { send(t, 2); }, "send to rank 2, tag 0: the ranks are 0 to 1");
    refused([&] { isend(t, -1); }, "rank -1");
    refused([&] { irecv(t, 0, Tag(-1)); }, "the tag must be 0 to 32000");
    refused([&] { irecv(t, 0, Tag(32001)); }, "tag 32001");
    refused([&] { send(torch::Tensor(), 0); }, "undefined");
    refused([&] { irecv(torch::ones({1}).expand({2}), 0); }, "share memory");
    refused(
        [&] {
          batch_isend_irecv({P2POp::send(t, 0), P2POp::receive(t, 9)});
        },
        "receive from rank 9");
  });
}

// The collectives' numbers do not shift, whoever sends meanwhile.
TEST(MessageTest, AreNoUnnamedCalls) {
  RunTorchRanks(2, [](int rank) {
    const Handle before = allreduce_async(torch::ones({1}));
    if (rank == 0) send(torch::ones({1}), 1);
    const Handle after = allgather_async(torch::full({1}, rank));
    if (rank == 1) recv_(torch::zeros({1}), 0);
    EXPECT_EQ(synchronize(after).numel(), 2);
    EXPECT_EQ(synchronize(before).item<float>(), 1);
  });
}

}  // namespace
}  // namespace sirtaki::tests
