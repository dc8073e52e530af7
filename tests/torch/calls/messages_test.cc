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
  RunTorchRanks(2, [](int rank, const Session& session) {
    if (rank == 0) {
      // A send may wait for its receive, and these come in another order.
      std::vector<Handle> sends;
      for (int i = 0; i < 4; ++i) {
        sends.push_back(isend(torch::full({2}, i), 1, Tag(i % 2), session));
      }
      for (const Handle& handle : sends) synchronize(handle);
      return;
    }
    auto got = torch::empty({2}, torch::kLong);
    for (const int value : {1, 0, 3, 2}) {
      EXPECT_TRUE(recv_(got, 0, Tag(value % 2), session).is_same(got));
      EXPECT_TRUE(torch::equal(got, torch::full({2}, value))) << got;
    }
  });
}

TEST(MessageTest, GoAroundARing) {
  for (const int size : {1, 2, 3, 4}) {
    RunTorchRanks(size, [size](int rank, const Session& session) {
      auto got = torch::empty({3, 2}).t();  // not flat
      const Handle receiving = irecv(got, (rank + size - 1) % size, {}, session);
      const Handle sending =
          isend(torch::full({2, 3}, rank * 1.0f), (rank + 1) % size, {}, session);
      EXPECT_TRUE(synchronize(receiving).is_same(got));
      synchronize(sending);
      EXPECT_TRUE(torch::equal(got, torch::full({2, 3}, (rank + size - 1) % size * 1.0f)));
    });
  }
}

TEST(MessageTest, ABatchMayCrossItself) {
  RunTorchRanks(3, [](int rank, const Session& session) {
    std::vector<P2POp> operations;
    std::vector<torch::Tensor> got(3);
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      got[static_cast<std::size_t>(peer)] = torch::empty({1}, torch::kLong);
      operations.push_back(P2POp::send(torch::full({1}, 10 * rank + peer), peer, 7));
      operations.push_back(P2POp::receive(got[static_cast<std::size_t>(peer)], peer, 7));
    }
    for (const Handle& handle : batch_isend_irecv(operations, {}, session)) synchronize(handle);
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      EXPECT_EQ(got[static_cast<std::size_t>(peer)].item<std::int64_t>(), 10 * peer + rank);
    }
  });
}

TEST(MessageTest, TheReceiverIsToldOfAnotherTypeOrShape) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    if (rank == 0) {
      send(torch::ones({2, 3}), 1, {}, session);
      send(torch::ones({2}, torch::kInt), 1, {}, session);
      send(torch::ones({2}), 1, {}, session);
      return;
    }
    auto into = torch::zeros({2});
    EXPECT_THAT(ErrorOf(ErrorCode::mismatch, [&] { recv_(into, 0, {}, session); }),
                AllOf(HasSubstr("[2, 3]"), HasSubstr("[2]"), HasSubstr("rank 0")));
    EXPECT_THAT(ErrorOf(ErrorCode::mismatch, [&] { recv_(into, 0, {}, session); }),
                AllOf(HasSubstr("int32"), HasSubstr("float32")));
    EXPECT_TRUE(torch::equal(recv_(into, 0, {}, session), torch::ones({2})));
  });
}

TEST(MessageTest, WhatCannotBeIsRefusedAtOnce) {
  RunTorchRanks(2, [](int, const Session& session) {
    const auto refused = [&](const std::function<void()>& call, const std::string& words) {
      EXPECT_THAT(ErrorOf(ErrorCode::invalid_argument, call), HasSubstr(words));
    };
    const auto t = torch::ones({2});
    refused([&] { send(t, 2, {}, session); }, "send to rank 2, tag 0: the ranks are 0 to 1");
    refused([&] { isend(t, -1, {}, session); }, "rank -1");
    refused([&] { irecv(t, 0, Tag(-1), session); }, "the tag must be 0 to 32000");
    refused([&] { irecv(t, 0, Tag(32001), session); }, "tag 32001");
    refused([&] { send(torch::Tensor(), 0, {}, session); }, "undefined");
    refused([&] { irecv(torch::ones({1}).expand({2}), 0, {}, session); }, "share memory");
    refused(
        [&] {
          batch_isend_irecv({P2POp::send(t, 0), P2POp::receive(t, 9)}, {}, session);
        },
        "receive from rank 9");
  });
}

// The collectives' numbers do not shift, whoever sends meanwhile.
TEST(MessageTest, AreNoUnnamedCalls) {
  RunTorchRanks(2, [](int rank, const Session& session) {
    const Handle before = allreduce_async(torch::ones({1}), {}, session);
    if (rank == 0) send(torch::ones({1}), 1, {}, session);
    const Handle after = allgather_async(torch::full({1}, rank), {}, session);
    if (rank == 1) recv_(torch::zeros({1}), 0, {}, session);
    EXPECT_EQ(synchronize(after).numel(), 2);
    EXPECT_EQ(synchronize(before).item<float>(), 1);
  });
}

}  // namespace
}  // namespace sirtaki::tests
