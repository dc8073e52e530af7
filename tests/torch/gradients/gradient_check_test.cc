// Through every differentiable collective: what backward() gives against finite differences.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sirtaki/barrier.h"
#include "sirtaki/collectives.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

using Tensors = std::vector<torch::Tensor>;
// The inputs of a rank are alike wherever they are asked for.
using Inputs = std::function<Tensors(int rank)>;
using Body = std::function<Tensors(const Tensors& inputs, int rank)>;

// Different on each rank, in no simple relation.
torch::Tensor Values(int rank, const std::vector<std::int64_t>& shape) {
  const auto count = torch::empty(shape).numel();
  return torch::sin(torch::arange(count, torch::kDouble) * 1.7 + rank + 0.3).reshape(shape);
}

// Quadratic in the outputs, so that central differences are exact but for rounding and the
// gradients depend on the values.
torch::Tensor LossOf(const Tensors& outputs, int rank) {
  auto loss = torch::zeros({}, torch::kDouble);
  for (const auto& output : outputs) {
    const auto weights = torch::cos(torch::arange(output.numel(), torch::kDouble) + 2.0 * rank);
    loss = loss + (weights.reshape(output.sizes()) * (output * output + output)).sum();
  }
  return loss;
}

double LossOfAll(const Inputs& inputs, const Body& body, int rank, int moved_rank,
                 std::size_t which, std::int64_t element, double by) {
  torch::NoGradGuard no_grad;
  Tensors mine = inputs(rank);
  if (rank == moved_rank) mine[which].view({-1})[element] += by;
  const auto loss = LossOf(body(mine, rank), rank);
  return allreduce(loss, AllreduceOptions().op(ReduceOp::Sum)).item<double>();
}

// The rank `joined` has joined before.
void CheckGradients(const Inputs& inputs, const Body& body, std::vector<int> sizes = {2, 3},
                    std::optional<int> joined = std::nullopt) {
  constexpr double kStep = 1e-3;
  for (const int size : sizes) {
    RunTorchRanks(size, [&](int rank) {
      if (rank == joined) {
        join();
        return;
      }
      Tensors mine = inputs(rank);
      for (auto& input : mine) input.requires_grad_();
      LossOf(body(mine, rank), rank).backward();
      for (int moved = 0; moved < size; ++moved) {
        if (moved == joined) continue;
        const Tensors of_moved = inputs(moved);
        for (std::size_t i = 0; i < of_moved.size(); ++i) {
          for (std::int64_t e = 0; e < of_moved[i].numel(); ++e) {
            const double above = LossOfAll(inputs, body, rank, moved, i, e, kStep);
            const double below = LossOfAll(inputs, body, rank, moved, i, e, -kStep);
            if (rank != moved) continue;
            ASSERT_TRUE(mine[i].grad().defined());
            EXPECT_NEAR(mine[i].grad().reshape({-1})[e].item<double>(),
                        (above - below) / (2 * kStep), 1e-7)
                << "rank " << rank << " of " << size << ", input " << i << ", element " << e;
          }
        }
      }
      if (joined) join();
    });
  }
}

Inputs OfShape(std::vector<std::int64_t> shape) {
  return [shape](int rank) { return Tensors{Values(rank, shape)}; };
}

// Rank r has r + 1 rows.
Tensors Uneven(int rank) { return {Values(rank, {rank + 1, 2})}; }

TEST(GradientCheck, AllreduceSum) {
  CheckGradients(OfShape({2, 2}), [](const Tensors& x, int) {
    return Tensors{
        allreduce(x[0], AllreduceOptions().op(ReduceOp::Sum).prescale(0.5).postscale(3).name("x"))};
  });
}

TEST(GradientCheck, AllreduceAverage) {
  CheckGradients(OfShape({3}), [](const Tensors& x, int) { return Tensors{allreduce(x[0])}; });
}

TEST(GradientCheck, AllreduceOfAView) {
  CheckGradients(OfShape({2, 3}), [](const Tensors& x, int) {
    return Tensors{allreduce(x[0].t(), AllreduceOptions().op(ReduceOp::Sum))};
  });
}

TEST(GradientCheck, GroupedAllreduce) {
  CheckGradients(
      [](int rank) {
        return Tensors{Values(rank, {2}), Values(rank + 5, {1, 2})};
      },
      [](const Tensors& x, int) { return grouped_allreduce(x); });
}

TEST(GradientCheck, Broadcast) {
  CheckGradients(OfShape({3}), [](const Tensors& x, int) { return Tensors{broadcast(x[0], 1)}; });
}

TEST(GradientCheck, GroupedBroadcast) {
  CheckGradients(
      [](int rank) {
        return Tensors{Values(rank, {2}), Values(rank + 5, {1, 2})};
      },
      [](const Tensors& x, int) { return grouped_broadcast(x, 0); });
}

// The others' copies are no part of the loss.
TEST(GradientCheck, Reduce) {
  for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average}) {
    // The copies of the others have gradients of their own.
    CheckGradients(OfShape({3}), [op](const Tensors& x, int) {
      return Tensors{reduce(x[0], 1, ReduceOptions().op(op).prescale(2))};
    });
  }
}

TEST(GradientCheck, GroupedReduce) {
  CheckGradients(
      [](int rank) {
        return Tensors{Values(rank, {2}), Values(rank + 5, {1, 2})};
      },
      [](const Tensors& x, int) { return grouped_reduce(x, 0); });
}

TEST(GradientCheck, AllgatherOfDifferentRows) {
  CheckGradients(Uneven, [](const Tensors& x, int) {
    return Tensors{allgather(x[0], AllgatherOptions().name("rows"))};
  });
}

TEST(GradientCheck, GroupedAllgatherWithAndWithoutRows) {
  CheckGradients(
      [](int rank) {
        return Tensors{Values(rank, {rank + 1, 2}), Values(rank + 5, {rank == 0 ? 0 : 2})};
      },
      [](const Tensors& x, int) { return grouped_allgather(x); });
}

TEST(GradientCheck, AllgatherInto) {
  CheckGradients(OfShape({2, 2}),
                 [](const Tensors& x, int) { return Tensors{allgather_into(x[0])}; });
}

TEST(GradientCheck, GroupedAllgatherInto) {
  CheckGradients(
      [](int rank) {
        return Tensors{Values(rank, {2}), Values(rank + 5, {1, 2})};
      },
      [](const Tensors& x, int) { return grouped_allgather_into(x); });
}

TEST(GradientCheck, Gather) {
  CheckGradients(Uneven, [](const Tensors& x, int) { return Tensors{gather(x[0], 1)}; });
}

TEST(GradientCheck, GroupedGather) {
  CheckGradients(
      [](int rank) {
        return Tensors{Values(rank, {rank + 1}), Values(rank + 5, {2, 2})};
      },
      [](const Tensors& x, int) { return grouped_gather(x, 0); });
}

TEST(GradientCheck, Scatter) {
  CheckGradients(
      [](int rank) {
        return Tensors{Values(rank, {rank == 1 ? 5 : 1, 2})};
      },
      [](const Tensors& x, int) { return Tensors{scatter(x[0], 1)}; });
}

TEST(GradientCheck, ScatterWithSplits) {
  CheckGradients([](int rank) { return Tensors{Values(rank, {rank == 0 ? 4 : 0})}; },
                 [](const Tensors& x, int) {
                   return Tensors{scatter(x[0], 0, ScatterOptions().splits({1, 0, 3}))};
                 },
                 {3});
}

TEST(GradientCheck, GroupedScatter) {
  CheckGradients(
      [](int rank) {
        return Tensors{Values(rank, {3}), Values(rank + 5, {4, 2})};
      },
      [](const Tensors& x, int) { return grouped_scatter(x, 0); });
}

TEST(GradientCheck, AlltoallOfEqualParts) {
  CheckGradients(OfShape({6}),
                 [](const Tensors& x, int) { return Tensors{alltoall(x[0]).tensor}; });
}

TEST(GradientCheck, AlltoallWithSplits) {
  // To rank 0 nothing, to the next ones more and more; rank r a row more each.
  const auto splits = [](int rank, int size) {
    std::vector<std::int64_t> rows;
    for (int i = 0; i < size; ++i) rows.push_back(i == 0 ? 0 : i + rank);
    return rows;
  };
  for (const int size : {2, 3}) {
    CheckGradients(
        [&, size](int rank) {
          std::int64_t rows = 0;
          for (const std::int64_t part : splits(rank, size)) rows += part;
          return Tensors{Values(rank, {rows, 2})};
        },
        [&, size](const Tensors& x, int rank) {
          const auto options = AlltoallOptions().name("x").splits(splits(rank, size));
          return Tensors{alltoall(x[0], options).tensor};
        },
        {size});
  }
}

TEST(GradientCheck, GroupedAlltoall) {
  CheckGradients(
      [](int rank) {
        return Tensors{Values(rank, {6}), Values(rank + 5, {6, 2})};
      },
      [](const Tensors& x, int) {
        Tensors results;
        for (auto& result : grouped_alltoall(x)) results.push_back(result.tensor);
        return results;
      });
}

TEST(GradientCheck, ReducescatterWithARemainder) {
  for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Average}) {
    CheckGradients(OfShape({5, 2}), [op](const Tensors& x, int) {
      return Tensors{reducescatter(x[0], ReducescatterOptions().op(op).postscale(2))};
    });
  }
}

TEST(GradientCheck, GroupedReducescatter) {
  CheckGradients(
      [](int rank) {
        return Tensors{Values(rank, {4}), Values(rank + 5, {5, 2})};
      },
      [](const Tensors& x, int) { return grouped_reducescatter(x); });
}

TEST(GradientCheck, WhenARankHasJoined) {
  const std::vector<Body> bodies = {
      [](const Tensors& x, int) { return Tensors{allreduce(x[0])}; },
      [](const Tensors& x, int) { return Tensors{allgather(x[0])}; },
      [](const Tensors& x, int) {
        return Tensors{broadcast(x[0], 2), reduce(x[0], 2)};
      },
      [](const Tensors& x, int) { return Tensors{gather(x[0], 2)}; },
      [](const Tensors& x, int) { return Tensors{scatter(x[0], 2)}; },
      [](const Tensors& x, int) {
        return Tensors{scatter(x[0], 0, ScatterOptions().splits({1, 2, 1}))};
      },
      [](const Tensors& x, int) { return Tensors{reducescatter(x[0])}; },
      [](const Tensors& x, int rank) {
        const std::vector<std::int64_t> splits = {1, rank == 0 ? 3 : 1, rank == 0 ? 0 : 2};
        return Tensors{alltoall(x[0], AlltoallOptions().splits(splits)).tensor};
      },
      [](const Tensors& x, int) {
        return grouped_allgather({x[0], x[0] * 2});
      },
  };
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    SCOPED_TRACE("body " + std::to_string(i));
    CheckGradients(OfShape({4, 2}), bodies[i], {3}, 1);
  }
}

TEST(GradientCheck, OnAProcessSet) {
  CheckGradients(OfShape({3}),
                 [](const Tensors& x, int rank) {
                   const auto set = add_process_set({0, 2});
                   if (rank == 1) return Tensors{x[0] * 1};
                   return Tensors{allgather(x[0], AllgatherOptions().process_set(set))};
                 },
                 {3});
}

TEST(GradientCheck, TwiceThroughAnAllreduceAndAnAllgather) {
  RunTorchRanks(2, [](int rank) {
    const auto x = torch::full({2}, rank + 1.0, torch::kDouble).requires_grad_();
    // The loss of all ranks together: the sum of (x0^2 + x1^2)^2, on each of them.
    const auto sum = allreduce(x * x, AllreduceOptions().op(ReduceOp::Sum));
    const auto rows = allgather(sum);
    const auto loss = (rows * rows).sum() / 4;
    const auto first = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
    // 4 x (x0^2 + x1^2), with x0^2 + x1^2 = 5
    EXPECT_TRUE(torch::allclose(first.detach(), x.detach() * 20));
    const auto second = torch::autograd::grad({first.sum()}, {x})[0];
    // The gradient of the sum over the ranks of 4 xr S is 4 S + 8 xi (x0 + x1).
    EXPECT_TRUE(torch::allclose(second, 20 + 8 * 3 * x.detach())) << second;
  });
}

TEST(GradientTest, ARankWhoseResultIsNotInItsLossTakesPartWithZeros) {
  RunTorchRanks(2, [](int rank) {
    const auto x = torch::ones({2}, torch::kDouble).requires_grad_();
    const auto y = torch::ones({2}, torch::kDouble).requires_grad_();
    const auto both = grouped_allreduce({x, y}, AllreduceOptions().op(ReduceOp::Sum));
    both[rank == 0 ? 0 : 1].sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), torch::ones({2}, torch::kDouble)));
    EXPECT_TRUE(torch::equal(y.grad(), torch::ones({2}, torch::kDouble)));
  });
}

TEST(GradientTest, IntegersOfAGroupHaveNone) {
  RunTorchRanks(2, [](int rank) {
    const auto x = torch::full({2}, rank + 1.0).requires_grad_();
    const auto both = grouped_alltoall({torch::tensor({rank, rank}), x});
    EXPECT_FALSE(both[0].tensor.requires_grad());
    EXPECT_TRUE(torch::equal(both[0].tensor, torch::tensor({0, 1})));
    (both[1].tensor * (rank + 1)).sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), torch::tensor({1.0f, 2.0f}))) << x.grad();
  });
}

TEST(GradientTest, WithoutNeedOfAGradientThereIsNoGraph) {
  RunTorchRanks(2, [](int) {
    EXPECT_FALSE(allreduce(torch::ones({1})).requires_grad());
    const auto leaf = torch::ones({1}).requires_grad_();
    {
      torch::NoGradGuard no_grad;
      EXPECT_FALSE(allreduce(leaf).requires_grad());
    }
    EXPECT_FALSE(synchronize(allreduce_async(leaf)).requires_grad());
    EXPECT_TRUE(allreduce(leaf).requires_grad());
  });
}

TEST(GradientTest, AMaximumHasNone) {
  RunTorchRanks(2, [](int) {
    const auto x = torch::ones({2}).requires_grad_();
    const auto most = allreduce(x, AllreduceOptions().name("most").op(ReduceOp::Max));
    EXPECT_THAT(ErrorOf(ErrorCode::Unsupported, [&] { most.sum().backward(); }),
                AllOf(HasSubstr("\"most\""), HasSubstr("max")));
  });
}

TEST(GradientTest, NamesOfTheLibraryAreRefused) {
  RunTorchRanks(2, [](int) {
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] {
      allreduce(torch::ones({1}), AllreduceOptions().name("#7.grad"));
    });
    EXPECT_THAT(text, AllOf(HasSubstr("\"#7.grad\""), HasSubstr("begins with '#'")));
  });
}

// Unnamed calls in between do not shift the numbers.
TEST(GradientTest, TheBackwardTakesNoCallNumber) {
  RunTorchRanks(2, [](int rank) {
    const auto x = torch::ones({2}).requires_grad_();
    const auto sum = allreduce(x, AllreduceOptions().op(ReduceOp::Sum));
    const Handle between = allreduce_async(torch::ones({3}));
    sum.sum().backward();
    const auto rows = allgather(torch::full({1}, rank));
    EXPECT_TRUE(torch::equal(rows, torch::tensor({0, 1})));
    EXPECT_EQ(synchronize(between).numel(), 3);
    EXPECT_TRUE(torch::equal(x.grad(), torch::full({2}, 2.0f)));
  });
}

}  // namespace
}  // namespace sirtaki::tests
