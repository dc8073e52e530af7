#include "sirtaki/reductions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "sirtaki/collectives.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

AllreduceOptions By(ReduceOp op, const std::string& name = "") {
  return AllreduceOptions().name(name).op(op);
}

TEST(ReduceOpTest, EachIsWhatItSays) {
  RunTorchRanks(3, [](int rank) {
    // 5 7 6 on one element, 3 1 2 on the other.
    const std::vector<int> first = {5, 7, 6};
    const std::vector<int> second = {3, 1, 2};
    const auto index = static_cast<std::size_t>(rank);
    const auto mine = torch::tensor({first[index], second[index]});
    const std::vector<std::pair<ReduceOp, torch::Tensor>> expected = {
        {ReduceOp::Sum, torch::tensor({18, 6})},      {ReduceOp::Average, torch::tensor({6, 2})},
        {ReduceOp::Min, torch::tensor({5, 1})},       {ReduceOp::Max, torch::tensor({7, 3})},
        {ReduceOp::Product, torch::tensor({210, 6})}, {ReduceOp::BitAnd, torch::tensor({4, 0})},
        {ReduceOp::BitOr, torch::tensor({7, 3})},     {ReduceOp::BitXor, torch::tensor({4, 0})}};
    for (const auto& [op, result] : expected) {
      EXPECT_TRUE(torch::equal(allreduce(mine, By(op)), result)) << static_cast<int>(op);
    }
  });
}

TEST(ReduceOpTest, OfTruthValues) {
  RunTorchRanks(2, [](int rank) {
    const auto mine = torch::tensor({1, rank, 0}).to(torch::kBool);
    const auto all = torch::tensor({1, 0, 0}).to(torch::kBool);
    const auto any = torch::tensor({1, 1, 0}).to(torch::kBool);
    const auto one = torch::tensor({0, 1, 0}).to(torch::kBool);
    for (const ReduceOp op : {ReduceOp::BitAnd, ReduceOp::Min, ReduceOp::Product}) {
      EXPECT_TRUE(torch::equal(allreduce(mine, By(op)), all));
    }
    for (const ReduceOp op : {ReduceOp::BitOr, ReduceOp::Max}) {
      EXPECT_TRUE(torch::equal(allreduce(mine, By(op)), any));
    }
    EXPECT_TRUE(torch::equal(allreduce(mine, By(ReduceOp::BitXor)), one));
  });
}

TEST(ReduceOpTest, OfComplexNumbers) {
  RunTorchRanks(2, [](int rank) {
    for (const auto type : {torch::kComplexFloat, torch::kComplexDouble}) {
      const auto mine =
          torch::complex(torch::tensor({1.0, 2.0}), torch::tensor({0.5, -1.0})).to(type);
      EXPECT_TRUE(torch::equal(allreduce(mine * (rank + 1), By(ReduceOp::Sum)), mine * 3));
      // A lazy conjugate: its memory holds other values.
      EXPECT_TRUE(torch::equal(allreduce(mine.conj()), mine.conj().resolve_conj()));
      auto written = mine.clone().conj();
      allreduce_(written, By(ReduceOp::Sum));
      EXPECT_TRUE(torch::equal(written.resolve_conj(), (mine * 2).conj().resolve_conj()));
    }
  });
}

TEST(ReduceOpTest, WhatATypeDoesNotHaveIsRefusedOnEveryRank) {
  RunTorchRanks(2, [](int) {
    const std::vector<std::pair<ReduceOp, torch::Tensor>> wrong = {
        {ReduceOp::Sum, torch::ones({2}, torch::kBool)},
        {ReduceOp::Average, torch::ones({2}, torch::kBool)},
        {ReduceOp::BitXor, torch::ones({2})},
        {ReduceOp::Min, torch::ones({2}, torch::kComplexFloat)},
        {ReduceOp::Adasum, torch::ones({2}, torch::kInt)},
        {ReduceOp::Sum, torch::ones({2}).to(torch::kFloat8_e5m2)}};
    for (const auto& [op, tensor] : wrong) {
      const auto text = ErrorOf(ErrorCode::InvalidArgument,
                                [&, t = tensor, o = op] { allreduce(t, By(o, "w")); });
      EXPECT_THAT(text, HasSubstr("\"w\""));
    }
    EXPECT_EQ(allreduce(torch::ones({1}), By(ReduceOp::Sum, "w")).item<float>(), 2);
  });
}

// A session remembers how a name was used last, and each of these differs from that in one thing.
TEST(KnownCallsTest, ANameMeansWhatItsLatestCallSays) {
  RunTorchRanks(2, [](int rank) {
    const ProcessSet both = add_process_set({0, 1});
    const auto mine = torch::tensor({1.0F + static_cast<float>(rank), 2.0F});
    const auto sum = torch::tensor({3.0F, 4.0F});
    const auto plain = By(ReduceOp::Sum, "w");
    const auto with = [&plain](auto change) {
      AllreduceOptions options = plain;
      change(options);
      return options;
    };
    const auto gives = [](const torch::Tensor& result, const torch::Tensor& expected) {
      return result.scalar_type() == expected.scalar_type() && torch::equal(result, expected);
    };
    const std::vector<std::function<bool()>> others = {
        [&] {
          return gives(allreduce(mine, By(ReduceOp::Max, "w")), torch::tensor({2.0F, 2.0F}));
        },
        [&] { return gives(allreduce(mine.to(torch::kInt), plain), sum.to(torch::kInt)); },
        [&] {
          return gives(allreduce(mine.view({2, 1}), plain), sum.view({2, 1}));
        },
        [&] { return gives(allreduce(mine, with([](auto& o) { o.prescale(2.0); })), sum * 2); },
        [&] { return gives(allreduce(mine, with([](auto& o) { o.postscale(2.0); })), sum * 2); },
        [&] { return gives(allreduce(mine, with([&](auto& o) { o.process_set(both); })), sum); },
        [&] {
          // Neither fits into float16.
          const auto half = with([](auto& o) {
            o.compression(Compression::F16).compression_scope(CompressionScope::Everywhere);
          });
          return std::isinf(allreduce(torch::full({2}, 1e6F), half)[0].item<float>());
        },
        [&] {
          const auto root = torch::tensor({2.0F, 2.0F});
          return gives(broadcast(mine, 1, BroadcastOptions().name("w")), root) &&
                 gives(broadcast(mine, 0, BroadcastOptions().name("w")), sum - root);
        },
        [&] {
          const auto rows = mine.narrow(0, 0, rank + 1);
          return gives(allgather(rows, AllgatherOptions().name("w")),
                       torch::tensor({1.0F, 2.0F, 2.0F}));
        },
        [&] {
          const auto text = ErrorOf(ErrorCode::InvalidArgument,
                                    [&] { allreduce_(torch::ones({1}).expand({2}), plain); });
          return text.find("share memory") != std::string::npos;
        },
        [&] {
          const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] {
            allreduce(mine, with([](auto& o) { o.timeout(std::chrono::milliseconds(-1)); }));
          });
          return text.find("negative") != std::string::npos;
        },
    };
    for (std::size_t i = 0; i < others.size(); ++i) {
      for (int again = 0; again < 2; ++again) EXPECT_TRUE(gives(allreduce(mine, plain), sum)) << i;
      for (int again = 0; again < 2; ++again) EXPECT_TRUE(others[i]()) << i;
    }
  });
}

TEST(ReduceTest, OnlyTheRootGetsTheResult) {
  RunTorchRanks(3, [](int rank) {
    for (int root = 0; root < 3; ++root) {
      const auto mine = torch::full({2, 2}, rank + 1);
      const auto sum = torch::full({2, 2}, 6);
      const auto options = ReduceOptions().op(ReduceOp::Sum);
      const auto got = reduce(mine, root, options);
      EXPECT_TRUE(torch::equal(got, rank == root ? sum : mine));
      EXPECT_FALSE(got.is_alias_of(mine));
      EXPECT_TRUE(torch::equal(mine, torch::full({2, 2}, rank + 1)));
      auto written = mine.clone().t();
      EXPECT_TRUE(reduce_(written, root, options).is_same(written));
      EXPECT_TRUE(torch::equal(written, rank == root ? sum : mine));
      auto again = mine.clone();
      synchronize(reduce_async_(again, root, ReduceOptions().op(ReduceOp::Max)));
      EXPECT_TRUE(torch::equal(again, rank == root ? torch::full({2, 2}, 3) : mine));
      const auto average = synchronize(reduce_async(mine, root));
      if (rank == root) {
        EXPECT_TRUE(torch::equal(average, torch::full({2, 2}, 2)));
      }
    }
  });
}

TEST(ReducescatterTest, GivesEachRankItsRows) {
  for (const int size : {1, 2, 3, 4}) {
    RunTorchRanks(size, [size](int rank) {
      const auto mine = torch::arange(10, torch::kDouble).reshape({5, 2}) * (rank + 1);
      const auto sum = torch::arange(10, torch::kDouble).reshape({5, 2}) * (size * (size + 1) / 2);
      const std::int64_t rows = 5 / size + (rank < 5 % size ? 1 : 0);
      const std::int64_t first = 5 / size * rank + std::min(rank, 5 % size);
      const auto options = ReducescatterOptions().op(ReduceOp::Sum);
      EXPECT_TRUE(torch::equal(reducescatter(mine, options), sum.slice(0, first, first + rows)));
      EXPECT_TRUE(torch::equal(synchronize(reducescatter_async(mine)),
                               sum.slice(0, first, first + rows) / size));
    });
  }
}

TEST(ReducescatterTest, RefusesWhatItCannotDo) {
  RunTorchRanks(2, [](int) {
    EXPECT_THAT(
        ErrorOf(
            ErrorCode::InvalidArgument,
            [&] { reducescatter(torch::ones({2}), ReducescatterOptions().op(ReduceOp::Product)); }),
        HasSubstr("product"));
    ErrorOf(ErrorCode::InvalidArgument, [&] { reducescatter(torch::tensor(1.0)); });
  });
}

TEST(GroupedTest, IsEachOfThemInEveryForm) {
  RunTorchRanks(3, [](int rank) {
    const auto tensors = [rank] {
      return std::vector<torch::Tensor>{torch::full({3}, rank, torch::kFloat),
                                        torch::full({2, 2}, rank, torch::kLong).t(),
                                        torch::empty({0, 5}), torch::tensor(rank * 1.0)};
    };
    const auto expect = [](const std::vector<torch::Tensor>& got) {
      ASSERT_EQ(got.size(), 4u);
      EXPECT_TRUE(torch::equal(got[0], torch::full({3}, 3.0f)));
      EXPECT_TRUE(torch::equal(got[1], torch::full({2, 2}, 3)));
      EXPECT_EQ(got[2].sizes(), (std::vector<std::int64_t>{0, 5}));
      EXPECT_EQ(got[3].item<double>(), 3);
    };
    const auto options = By(ReduceOp::Sum, "all");
    expect(grouped_allreduce(tensors(), options));
    expect(synchronize(grouped_allreduce_async(tensors(), options)));
    auto written = tensors();
    const auto same = grouped_allreduce_(written, options);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(same[i].is_same(written[i]));
    expect(written);
    written = tensors();
    const GroupedHandle handle = grouped_allreduce_async_(written, options);
    synchronize(handle);
    EXPECT_TRUE(poll(handle));
    expect(written);
  });
}

TEST(GroupedTest, NoneStartsBeforeAllAreThere) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<torch::Tensor> two = {torch::ones({1}), torch::ones({2})};
    GroupedHandle handle;
    if (rank == 0) handle = grouped_allreduce_async(two, By(ReduceOp::Sum, "g"));
    barrier();
    if (rank == 0) {
      EXPECT_FALSE(poll(handle));
    }
    barrier();
    if (rank == 1) handle = grouped_allreduce_async(two, By(ReduceOp::Sum, "g"));
    EXPECT_EQ(synchronize(handle)[1].sum().item<float>(), 4);
  });
}

TEST(GroupedTest, WhatDiffersIsToldOnEveryRank) {
  RunTorchRanks(3, [](int rank) {
    const auto options = By(ReduceOp::Sum, "g");
    const auto shapes = ErrorOf(ErrorCode::Mismatch, [&] {
      grouped_allreduce({torch::ones({2}), torch::ones({rank == 1 ? 4 : 3})}, options);
    });
    EXPECT_THAT(shapes, AllOf(HasSubstr("\"g\""), HasSubstr("[3]"), HasSubstr("[4]"),
                              HasSubstr("ranks 0, 2"), HasSubstr("rank 1")));
    const auto counts = ErrorOf(ErrorCode::Mismatch, [&] {
      grouped_allreduce(std::vector<torch::Tensor>(rank == 2 ? 3 : 2, torch::ones({2})), options);
    });
    EXPECT_THAT(counts, AllOf(HasSubstr("2 tensors"), HasSubstr("3 tensors"), HasSubstr("rank 2")));
    const auto alone = ErrorOf(ErrorCode::Mismatch, [&] {
      if (rank == 0) {
        allreduce(torch::ones({2}), options);
      } else {
        grouped_allreduce({torch::ones({2})}, options);
      }
    });
    EXPECT_THAT(alone, HasSubstr("rank 0"));
    const auto invalid = ErrorOf(ErrorCode::InvalidArgument, [&] {
      grouped_allreduce({torch::ones({2}), rank == 1 ? torch::Tensor() : torch::ones({2})},
                        options);
    });
    EXPECT_THAT(invalid,
                AllOf(HasSubstr("tensor 1 of 2: the tensor is undefined"), HasSubstr("rank 1")));
    const auto empty = ErrorOf(ErrorCode::InvalidArgument, [&] { grouped_allreduce({}, options); });
    EXPECT_THAT(empty, HasSubstr("is empty"));
    EXPECT_EQ(grouped_allreduce({torch::ones({2})}, options)[0].sum().item<float>(), 6);
  });
}

TEST(GroupedTest, ReduceAndReducescatter) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<torch::Tensor> mine = {torch::full({2}, rank + 1.0),
                                             torch::full({3, 2}, rank + 1.0)};
    const auto sum = ReduceOptions().op(ReduceOp::Sum);
    const auto reduced = grouped_reduce(mine, 1, sum);
    EXPECT_EQ(reduced[1].sum().item<double>(), rank == 1 ? 18 : 6);
    EXPECT_EQ(synchronize(grouped_reduce_async(mine, 0, sum))[0].sum().item<double>(),
              rank == 0 ? 6 : 4);
    const auto rows = grouped_reducescatter(mine, ReducescatterOptions().op(ReduceOp::Sum));
    EXPECT_EQ(rows[0].size(0), 1);
    EXPECT_EQ(rows[1].size(0), rank == 0 ? 2 : 1);
    EXPECT_EQ(rows[1].sum().item<double>(), rank == 0 ? 12 : 6);
    const auto again = synchronize(grouped_reducescatter_async(mine));
    EXPECT_EQ(again[0].item<double>(), 1.5);
    auto written = std::vector<torch::Tensor>{mine[0].clone(), mine[1].clone()};
    grouped_reduce_(written, 0, sum);
    EXPECT_EQ(written[0].sum().item<double>(), rank == 0 ? 6 : 4);
    synchronize(grouped_reduce_async_(written, 0, sum));
    EXPECT_EQ(written[0].sum().item<double>(), rank == 0 ? 10 : 4);
  });
}

// No message could carry the list, so the ranks learn what is wrong without it.
TEST(GroupedTest, AListThatIsTooLongIsRefusedOnEveryRank) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<torch::Tensor> many((1 << 16) + 1, torch::ones({1}));
    const std::vector<torch::Tensor> one(1, torch::ones({1}));
    try {
      grouped_allreduce(rank == 0 ? many : one, By(ReduceOp::Sum, "many"));
      ADD_FAILURE() << "it was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("the list has 65537 tensors; at most 65536 are allowed"));
    }
    EXPECT_EQ(grouped_allreduce(one, By(ReduceOp::Sum, "many"))[0].item<double>(), 2);
  });
}

}  // namespace
}  // namespace sirtaki::tests
