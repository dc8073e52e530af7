#include "sirtaki/movement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "sirtaki/collectives.h"
#include "sirtaki/session.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

using Tensors = std::vector<torch::Tensor>;

// `rows` rows of two, all of which hold the rank.
torch::Tensor Rows(int rank, std::int64_t rows) { return torch::full({rows, 2}, rank); }

torch::Tensor Column(std::vector<std::int64_t> values) {
  return torch::tensor(values).unsqueeze(1).expand({-1, 2});
}

TEST(AllgatherIntoTest, JoinsEqualShapes) {
  for (const int size : {1, 2, 3, 4}) {
    RunTorchRanks(size, [size](int rank) {
      const auto expected = torch::arange(size).repeat_interleave(2).unsqueeze(1).expand({-1, 2});
      EXPECT_TRUE(torch::equal(allgather_into(Rows(rank, 2)), expected));
      const Handle handle = allgather_into_async(Rows(rank, 2));
      EXPECT_TRUE(torch::equal(synchronize(handle), expected));
      const auto both = grouped_allgather_into({Rows(rank, 2), Rows(rank, 1)});
      EXPECT_TRUE(torch::equal(both[0], expected));
      EXPECT_EQ(both[1].size(0), size);
      const auto async = grouped_allgather_into_async({Rows(rank, 2)});
      EXPECT_TRUE(torch::equal(synchronize(async)[0], expected));
    });
  }
}

TEST(AllgatherIntoTest, DifferentFirstDimensionsAreAMismatch) {
  RunTorchRanks(2, [](int rank) {
    const auto text = ErrorOf(ErrorCode::Mismatch, [&] {
      allgather_into(Rows(rank, rank + 1), AllgatherOptions().name("w"));
    });
    EXPECT_THAT(text, AllOf(HasSubstr("\"w\""), HasSubstr("[1, 2]"), HasSubstr("[2, 2]")));
  });
}

TEST(AllgatherTest, TellsWhoseRowsTheyAre) {
  RunTorchRanks(3, [](int rank) {
    const Handle handle = allgather_async(Rows(rank, rank));
    EXPECT_THAT(received_splits(handle), ElementsAre(0, 1, 2));
    EXPECT_TRUE(torch::equal(synchronize(handle), Column({1, 2, 2})));
    const auto both = grouped_allgather_async({Rows(rank, 1), Rows(rank, rank)});
    EXPECT_THAT(received_splits(both), ElementsAre(ElementsAre(1, 1, 1), ElementsAre(0, 1, 2)));
    EXPECT_EQ(grouped_allgather({Rows(rank, 1), Rows(rank, rank)})[1].size(0), 3);
    EXPECT_TRUE(received_splits(allreduce_async(torch::ones({1}))).empty());
  });
}

TEST(GatherTest, OnlyTheRootGetsRows) {
  for (const int size : {1, 2, 3, 4}) {
    RunTorchRanks(size, [size](int rank) {
      for (int root = 0; root < size; ++root) {
        std::vector<std::int64_t> all;
        for (int i = 0; i < size; ++i) all.insert(all.end(), static_cast<std::size_t>(i), i);
        const auto expected = all.empty() ? torch::empty({0, 2}, torch::kLong) : Column(all);
        const auto got = gather(Rows(rank, rank), root);
        EXPECT_EQ(got.sizes(), rank == root ? expected.sizes() : at::IntArrayRef({0, 2}));
        if (rank == root) {
          EXPECT_TRUE(torch::equal(got, expected));
        }
        const Handle handle = gather_async(Rows(rank, rank), root);
        EXPECT_EQ(synchronize(handle).size(0), rank == root ? expected.size(0) : 0);
        EXPECT_EQ(received_splits(handle).size(),
                  rank == root ? static_cast<std::size_t>(size) : 0);
        const auto both = grouped_gather({Rows(rank, rank), Rows(rank, 1)}, root);
        EXPECT_EQ(both[1].size(0), rank == root ? size : 0);
        const auto async = grouped_gather_async({Rows(rank, 1)}, root);
        EXPECT_EQ(synchronize(async)[0].size(0), rank == root ? size : 0);
      }
    });
  }
}

TEST(ScatterTest, DealsOutTheRowsOfTheRoot) {
  for (const int size : {1, 2, 3, 4}) {
    RunTorchRanks(size, [size](int rank) {
      for (int root = 0; root < size; ++root) {
        const auto all = torch::arange(10).reshape({5, 2});
        const std::int64_t rows = 5 / size + (rank < 5 % size ? 1 : 0);
        const std::int64_t first = 5 / size * rank + std::min(rank, 5 % size);
        const auto mine = all.slice(0, first, first + rows);
        const auto given = rank == root ? all : torch::empty({0, 2}, torch::kLong);
        EXPECT_TRUE(torch::equal(scatter(given, root), mine));
        EXPECT_TRUE(torch::equal(synchronize(scatter_async(given, root)), mine));
        const auto both = grouped_scatter({given, given}, root);
        EXPECT_TRUE(torch::equal(both[1], mine));
        const auto async = grouped_scatter_async({given}, root);
        EXPECT_TRUE(torch::equal(synchronize(async)[0], mine));
      }
    });
  }
}

TEST(ScatterTest, BySplitsOfTheRoot) {
  RunTorchRanks(3, [](int rank) {
    const auto given = rank == 1 ? torch::arange(4) : torch::empty({7}, torch::kLong);
    const auto got = scatter(given, 1, ScatterOptions().splits({3, 0, 1}));
    EXPECT_EQ(got.size(0), rank == 0 ? 3 : rank == 1 ? 0 : 1);
    if (rank == 2) {
      EXPECT_EQ(got.item<std::int64_t>(), 3);
    }
  });
}

TEST(AlltoallTest, EqualParts) {
  for (const int size : {1, 2, 3, 4}) {
    RunTorchRanks(size, [size](int rank) {
      // Part j of rank i holds 10 i + j, twice.
      const auto mine = (torch::arange(size) + 10 * rank).repeat_interleave(2);
      const auto expected = (torch::arange(size) * 10 + rank).repeat_interleave(2);
      const auto got = alltoall(mine);
      EXPECT_TRUE(torch::equal(got.tensor, expected)) << got.tensor;
      EXPECT_EQ(got.received_splits, std::vector<std::int64_t>(static_cast<std::size_t>(size), 2));
    });
  }
}

TEST(AlltoallTest, SplitsThatDiffer) {
  RunTorchRanks(3, [](int rank) {
    // Rank i gives rank j i + j rows.
    const std::vector<std::int64_t> splits = {rank, rank + 1, rank + 2};
    const auto mine = Rows(rank, 3 * rank + 3);
    const auto options = AlltoallOptions().splits(splits);
    const auto expect = [rank](const torch::Tensor& tensor, const std::vector<std::int64_t>& from) {
      EXPECT_THAT(from, ElementsAre(rank, rank + 1, rank + 2));
      std::vector<std::int64_t> rows;
      for (int i = 0; i < 3; ++i) rows.insert(rows.end(), static_cast<std::size_t>(i + rank), i);
      EXPECT_TRUE(torch::equal(tensor, Column(rows))) << tensor;
    };
    const auto got = alltoall(mine, options);
    expect(got.tensor, got.received_splits);
    const Handle handle = alltoall_async(mine, options);
    expect(synchronize(handle), received_splits(handle));
    const auto both = grouped_alltoall({mine, mine.to(torch::kFloat)}, options);
    expect(both[0].tensor, both[0].received_splits);
    expect(both[1].tensor.to(torch::kLong), both[1].received_splits);
    const auto async = grouped_alltoall_async({mine}, options);
    expect(synchronize(async)[0], received_splits(async)[0]);
  });
}

// Every rank throws, and the name works again at once.
void ExpectRefused(const std::function<void(int rank)>& call, const std::string& words) {
  for (const int size : {2, 3, 4}) {
    RunTorchRanks(size, [&](int rank) {
      const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { call(rank); });
      EXPECT_THAT(text, AllOf(HasSubstr("\"w\""), HasSubstr(words), HasSubstr("rank")));
      const auto got = alltoall(torch::arange(size), AlltoallOptions().name("w"));
      EXPECT_TRUE(torch::equal(got.tensor, torch::full({size}, rank)));
    });
  }
}

TEST(SplitsTest, WrongOnesAreRefusedOnEveryRank) {
  const auto alltoall_with = [](std::vector<std::int64_t> splits) {
    return [splits](int rank) {
      AlltoallOptions options;
      options.name("w");
      std::vector<std::int64_t> right(static_cast<std::size_t>(size()), 0);
      right[0] = 4;
      std::vector<std::int64_t> wrong = splits;
      wrong.resize(std::max(wrong.size(), right.size()), 0);
      options.splits(rank == 1 ? wrong : right);
      alltoall(torch::arange(4), options);
    };
  };
  ExpectRefused(alltoall_with({2, 3}), "the splits add up to 5, but the first dimension is 4");
  ExpectRefused(alltoall_with({2, 1}), "the splits add up to 3, but the first dimension is 4");
  ExpectRefused(alltoall_with({5, -1}), "a split is negative: -1");
  ExpectRefused(alltoall_with({4, 0, 0, 0, 0}), "5 splits were given for");
  ExpectRefused(
      [](int rank) {
        alltoall(torch::arange(size() + (rank == 1 ? 1 : 0)), AlltoallOptions().name("w"));
      },
      "cannot be divided into equal parts");
  ExpectRefused([](int) { scatter(torch::arange(4), 0, ScatterOptions().name("w").splits({9})); },
                "1 splits were given for");
}

TEST(MovementTest, RootsThatAreNoRankAreRefused) {
  for (const int size : {2, 3, 4}) {
    RunTorchRanks(size, [size](int) {
      const auto t = torch::ones({size});
      const std::vector<std::function<void(int)>> calls = {
          [&](int root) { reduce(t, root); }, [&](int root) { gather(t, root); },
          [&](int root) { scatter(t, root); }, [&](int root) { broadcast(t, root); }};
      for (const auto& call : calls) {
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { call(size); }),
                    HasSubstr("root rank " + std::to_string(size)));
        ErrorOf(ErrorCode::InvalidArgument, [&] { call(-1); });
      }
    });
  }
}

TEST(MovementTest, WhatDiffersIsToldOnEveryRank) {
  for (const int size : {2, 3, 4}) {
    RunTorchRanks(size, [](int rank) {
      const auto odd = [rank](auto usual, auto other) { return rank == 1 ? other : usual; };
      const auto expect = [](const std::string& a, const std::string& b,
                             const std::function<void()>& call) {
        EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, call),
                    AllOf(HasSubstr("\"w\""), HasSubstr(a), HasSubstr(b), HasSubstr("rank 1")));
      };
      const auto flat = torch::ones({12});
      expect("float32", "float64", [&] {
        alltoall(flat.to(odd(torch::kFloat, torch::kDouble)), AlltoallOptions().name("w"));
      });
      expect("[*, 3]", "[*, 2]", [&] {
        gather(torch::ones({1, odd(3, 2)}), 0, GatherOptions().name("w"));
      });
      expect("[*, 3]", "[*, 2]", [&] {
        alltoall(torch::ones({12, odd(3, 2)}), AlltoallOptions().name("w"));
      });
      expect("root 0", "root 1", [&] { scatter(flat, odd(0, 1), ScatterOptions().name("w")); });
      expect("root 0", "root 1", [&] { gather(flat, odd(0, 1), GatherOptions().name("w")); });
      expect("root 0", "root 1", [&] { reduce(flat, odd(0, 1), ReduceOptions().name("w")); });
      expect("sum", "max", [&] {
        reducescatter(flat, ReducescatterOptions().name("w").op(odd(ReduceOp::Sum, ReduceOp::Max)));
      });
      expect("sum", "min", [&] {
        reduce(flat, 0, ReduceOptions().name("w").op(odd(ReduceOp::Sum, ReduceOp::Min)));
      });
      expect("gather", "scatter", [&] {
        if (rank == 1) {
          scatter(flat, 0, ScatterOptions().name("w"));
        } else {
          gather(flat, 0, GatherOptions().name("w"));
        }
      });
      EXPECT_EQ(gather(flat, 0, GatherOptions().name("w")).size(0),
                rank == 0 ? 12 * sirtaki::size() : 0);
    });
  }
}

// The first time under its name it gets an id; changed on one rank it is found all the same.
TEST(MovementTest, ACallThatComesBackChangedOnOneRankIsFound) {
  RunTorchRanks(2, [](int rank) {
    const auto options = AlltoallOptions().name("again");
    for (int i = 0; i < 3; ++i) alltoall(torch::ones({4, 2}), options);
    ErrorOf(ErrorCode::Mismatch, [&] { alltoall(torch::ones({4, rank == 0 ? 2 : 3}), options); });
    EXPECT_EQ(alltoall(torch::ones({4, 2}), options).tensor.sum().item<float>(), 8);
  });
}

TEST(MovementTest, EveryTypeMoves) {
  RunTorchRanks(2, [](int rank) {
    for (const auto type :
         {torch::kUInt8, torch::kBool, torch::kHalf, torch::kBFloat16, torch::kComplexFloat,
          torch::kComplexDouble, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2}) {
      const auto mine = torch::tensor({0, 1}).to(type);
      const auto bytes = [](const torch::Tensor& t) { return t.view(torch::kUInt8).clone(); };
      const auto twice = torch::cat({bytes(mine), bytes(mine)});
      EXPECT_TRUE(torch::equal(bytes(allgather(mine)), twice)) << type;
      EXPECT_TRUE(torch::equal(bytes(allgather_into(mine)), twice)) << type;
      EXPECT_TRUE(torch::equal(bytes(broadcast(mine, 1)), bytes(mine))) << type;
      const auto parts = alltoall(mine).tensor;
      EXPECT_TRUE(torch::equal(bytes(parts), bytes(torch::tensor({rank, rank}).to(type)))) << type;
    }
  });
}

TEST(GroupedTest, Broadcast) {
  RunTorchRanks(3, [](int rank) {
    const auto tensors = [rank] { return Tensors{Rows(rank, 2), torch::full({3}, rank * 1.0)}; };
    const auto expect = [](const Tensors& got) {
      EXPECT_TRUE(torch::equal(got[0], Rows(2, 2)));
      EXPECT_TRUE(torch::equal(got[1], torch::full({3}, 2.0)));
    };
    expect(grouped_broadcast(tensors(), 2));
    expect(synchronize(grouped_broadcast_async(tensors(), 2)));
    const Tensors written = tensors();
    EXPECT_TRUE(grouped_broadcast_(written, 2)[0].is_same(written[0]));
    expect(written);
    const Tensors again = tensors();
    synchronize(grouped_broadcast_async_(again, 2));
    expect(again);
  });
}

}  // namespace
}  // namespace sirtaki::tests
