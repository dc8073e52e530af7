#include "sirtaki/objects.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "sirtaki/barrier.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string BytesOfRank(int rank) {
  return std::string(static_cast<std::size_t>(3 * rank), static_cast<char>('a' + rank)) +
         std::string(1, '\0');
}

TEST(ObjectsTest, BytesOfAnyLength) {
  for (const int size : {1, 2, 3}) {
    RunTorchRanks(size, [&](int rank) {
      for (int root = 0; root < size; ++root) {
        EXPECT_EQ(broadcast_object(BytesOfRank(rank), root, ""), BytesOfRank(root));
        EXPECT_EQ(broadcast_object(BytesOfRank(rank), root, "again"), BytesOfRank(root));
      }
      EXPECT_EQ(broadcast_object(rank == 0 ? "" : "something", 0, ""), "");
      std::vector<std::string> all;
      for (int other = 0; other < size; ++other) all.push_back(BytesOfRank(other));
      EXPECT_EQ(allgather_object(BytesOfRank(rank), ""), all);
      EXPECT_EQ(allgather_object(BytesOfRank(rank), "again"), all);
      EXPECT_EQ(allgather_object("", "again"),
                std::vector<std::string>(static_cast<std::size_t>(size)));
    });
  }
}

TEST(ObjectsTest, WhatConvertsToAStringIsBytes) {
  RunTorchRanks(2, [](int rank) {
    const char* pointer = rank == 0 ? "zero" : "one";
    static_assert(std::is_same_v<decltype(broadcast_object("literal", 0)), std::string>);
    static_assert(std::is_same_v<decltype(broadcast_object(pointer, 0)), std::string>);
    EXPECT_EQ(broadcast_object(pointer, 1, "name"), "one");
    EXPECT_EQ(broadcast_object("literal", 0, "name"), "literal");
    EXPECT_THAT(allgather_object(pointer, "name"), ElementsAre("zero", "one"));
  });
}

TEST(ObjectsTest, NamedCallsMayBeUnderWayAtOnceInAnyOrder) {
  RunTorchRanks(2, [](int rank) {
    // Each rank's threads start in another order; a name decides what belongs together.
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
      const int number = rank == 0 ? i : 2 - i;
      threads.emplace_back([=, session = detail::CurrentSession()] {
        const detail::SessionScope scope(session);
        const std::string name = "object " + std::to_string(number);
        const auto mine = name + " of " + std::to_string(rank);
        EXPECT_EQ(broadcast_object(mine, 1, name), name + " of 1");
        EXPECT_EQ(broadcast_object(torch::full({5000}, number + rank), 1, name)
                      .sum()
                      .item<std::int64_t>(),
                  5000 * (number + 1));
        EXPECT_THAT(allgather_object(mine, name), ElementsAre(name + " of 0", name + " of 1"));
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST(ObjectsTest, TensorsOfWhateverKind) {
  RunTorchRanks(3, [](int rank) {
    const auto check = [&](const torch::Tensor& of_root) {
      const auto got = broadcast_object(rank == 1 ? of_root : torch::Tensor(), 1, "tensor");
      EXPECT_EQ(got.scalar_type(), of_root.scalar_type());
      EXPECT_TRUE(torch::equal(got, of_root));
      EXPECT_EQ(got.requires_grad(), of_root.requires_grad());
    };
    check(Waves({3, 4}, 1));
    check(torch::empty({0, 2}));
    check(torch::tensor(3));
    check(Waves({100, 200}, 2).t());  // not contiguous
    check(Waves({5'000'001}, 3));     // two and a half chunks of 16 MB
    check(torch::ones({4}, torch::requires_grad()));
    check(torch::full({2}, c10::complex<float>(1, 2)));  // no collective takes these
  });
}

TEST(ObjectsTest, ListsValuesAndModules) {
  RunTorchRanks(2, [](int rank) {
    std::vector<torch::Tensor> list;
    if (rank == 0) list = {Waves({3}, 1), torch::arange(9000)};
    list = broadcast_object(list, 0, "");
    ASSERT_EQ(list.size(), 2u);
    EXPECT_TRUE(torch::equal(list[0], Waves({3}, 1)));
    EXPECT_TRUE(torch::equal(list[1], torch::arange(9000)));

    c10::IValue value;
    if (rank == 0) value = c10::IValue(std::make_tuple(7, std::string("seven"), Waves({4}, 1)));
    value = broadcast_object(value, 0, "");
    ASSERT_TRUE(value.isTuple());
    EXPECT_EQ(value.toTupleRef().elements()[0].toInt(), 7);
    EXPECT_EQ(value.toTupleRef().elements()[1].toStringRef(), "seven");
    EXPECT_TRUE(torch::equal(value.toTupleRef().elements()[2].toTensor(), Waves({4}, 1)));
    EXPECT_TRUE(broadcast_object(rank == 0 ? c10::IValue() : c10::IValue(1), 0, "").isNone());

    auto net = std::make_shared<SmallNet>();
    torch::nn::Linear layer(2, 3);
    torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(rank);
    layer->weight.fill_(rank);
    EXPECT_EQ(broadcast_object(net, 1, ""), net);
    for (auto& parameter : net->parameters()) EXPECT_TRUE(parameter.eq(1).all().item<bool>());
    EXPECT_EQ(broadcast_object(layer, 1, "").ptr(), layer.ptr());
    EXPECT_TRUE(layer->weight.eq(1).all().item<bool>());
  });
}

TEST(ObjectsTest, ObjectsOfAllRanks) {
  for (const int size : {1, 3}) {
    RunTorchRanks(size, [&](int rank) {
      const auto mine = torch::full({1000 * rank + 1}, rank);
      const auto tensors = allgather_object(mine, "t");
      ASSERT_EQ(tensors.size(), static_cast<std::size_t>(size));
      for (int other = 0; other < size; ++other) {
        EXPECT_TRUE(torch::equal(tensors[static_cast<std::size_t>(other)],
                                 torch::full({1000 * other + 1}, other)));
      }
      EXPECT_FALSE(tensors[static_cast<std::size_t>(rank)].is_alias_of(mine));

      torch::nn::Linear layer(2, 3);
      {
        torch::NoGradGuard no_grad;
        layer->weight.fill_(rank);
      }
      const auto layers = allgather_object(layer, "");
      const auto values = allgather_object(c10::IValue(rank), "");
      ASSERT_EQ(layers.size(), static_cast<std::size_t>(size));
      for (int other = 0; other < size; ++other) {
        const auto& of_other = layers[static_cast<std::size_t>(other)];
        EXPECT_TRUE(of_other->weight.eq(other).all().item<bool>());
        EXPECT_NE(of_other.ptr(), layer.ptr());
        EXPECT_EQ(values[static_cast<std::size_t>(other)].toInt(), other);
      }
    });
  }
}

TEST(ObjectsTest, AModuleThatCannotBeCopiedIsThrownOnAllRanks) {
  RunTorchRanks(2, [](int) {
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] { allgather_object(std::make_shared<SmallNet>(), ""); }),
                AllOf(HasSubstr("the object of rank 0 cannot be loaded"), HasSubstr("clone()")));
  });
}

TEST(ObjectsTest, WhatCannotBeSavedIsThrownOnAllRanks) {
  RunTorchRanks(2, [](int rank) {
    const auto mine = rank == 1 ? torch::Tensor() : torch::ones({2});
    for (const std::string name : {"", "thing"}) {
      const std::string of = name.empty() ? ": " : " \"thing\": ";
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { broadcast_object(mine, 1, name); }),
                  AllOf(HasSubstr("broadcast_object" + of + "cannot be saved: "),
                        HasSubstr("on rank 1"), testing::Not(HasSubstr("frame #"))));
      EXPECT_THAT(
          ErrorOf(ErrorCode::InvalidArgument, [&] { allgather_object(mine, name); }),
          AllOf(HasSubstr("allgather_object" + of + "cannot be saved: "), HasSubstr("on rank 1")));
    }
    EXPECT_EQ(broadcast_object("still works", 0, "thing"), "still works");
  });
}

// What it saves, it can load on every rank but one.
struct Picky {
  torch::Tensor tensor;
};
torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const Picky& picky) {
  archive.write("tensor", picky.tensor);
  return archive;
}
thread_local bool this_rank_can_load = true;
torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, Picky& picky) {
  if (!this_rank_can_load) throw std::runtime_error("not my taste");
  archive.read("tensor", picky.tensor);
  return archive;
}

TEST(ObjectsTest, WhatCannotBeLoadedOnOneRankIsThrownOnAll) {
  RunTorchRanks(3, [](int rank) {
    const Picky mine{torch::full({6'000'000}, rank)};
    EXPECT_EQ(broadcast_object(mine, 1, "").tensor[0].item<std::int64_t>(), 1);
    this_rank_can_load = rank != 2;
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { broadcast_object(mine, 1, ""); }),
                AllOf(HasSubstr("cannot be loaded: not my taste"), HasSubstr("on rank 2")));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { allgather_object(mine, ""); }),
                AllOf(HasSubstr("the object of rank 0 cannot be loaded: not my taste"),
                      HasSubstr("on rank 2")));
    this_rank_can_load = true;
    EXPECT_EQ(allgather_object(mine, "")[2].tensor[0].item<std::int64_t>(), 2);
  });
}

TEST(ObjectsTest, AnObjectIsToldOfItsRankWhileAnotherHasJoined) {
  RunTorchRanks(3, [](int rank) {
    this_rank_can_load = rank != 2;
    if (rank > 0) {
      EXPECT_THAT(
          ErrorOf(ErrorCode::InvalidArgument,
                  [&] { allgather_object(Picky{torch::ones({1})}, ""); }),
          AllOf(HasSubstr("the object of rank 1 cannot be loaded"), HasSubstr("on rank 2")));
    }
    join();
  });
}

TEST(ObjectsTest, RootsThatDifferOrDoNotExistAreRefused) {
  RunTorchRanks(2, [](int rank) {
    const auto bytes = [&](int root) { broadcast_object("x", root, "o"); };
    const auto tensor = [&](int root) { broadcast_object(torch::ones({1}), root, "o"); };
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { bytes(rank); }),
                AllOf(HasSubstr("root 0"), HasSubstr("root 1")));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { tensor(rank); }),
                AllOf(HasSubstr("root 0"), HasSubstr("root 1")));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { bytes(2); }), HasSubstr("root rank 2"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { tensor(-1); }),
                HasSubstr("root rank -1"));
  });
}

TEST(ObjectsTest, DifferentKindsOfCallsAreAMismatch) {
  RunTorchRanks(2, [](int rank) {
    for (const std::string name : {"", "o"}) {
      ErrorOf(ErrorCode::Mismatch, [&] {
        if (rank == 0) broadcast_object("x", 0, name);
        if (rank == 1) broadcast_object(torch::ones({1}), 0, name);
      });
      ErrorOf(ErrorCode::Mismatch, [&] {
        if (rank == 0) broadcast_object("x", 0, name);
        if (rank == 1) allgather_object("x", name);
      });
      ErrorOf(ErrorCode::Mismatch, [&] {
        if (rank == 0) allgather_object(torch::ones({1}), name);
        if (rank == 1) allgather_object("x", name);
      });
    }
  });
}

}  // namespace
}  // namespace sirtaki::tests
