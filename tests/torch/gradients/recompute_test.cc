// recompute() gives the gradients of the plain call, to the bit, and keeps nothing of its inside.
#include "sirtaki/recompute.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sirtaki/data_parallel.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/reductions.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Tensors = std::vector<torch::Tensor>;

// Two layers, with dropout or without.
struct SegmentImpl : torch::nn::Module {
  explicit SegmentImpl(double phase, double dropout = 0) : dropout_rate(dropout) {
    in = register_parameter("in", 0.5 * Waves({5, 7}, phase));
    out = register_parameter("out", 0.5 * Waves({7, 5}, phase + 1));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    ++runs;
    auto h = torch::tanh(x.matmul(in));
    if (dropout_rate > 0) h = torch::dropout(h, dropout_rate, /*train=*/true);
    return h.matmul(out) + x;
  }
  torch::Tensor in;
  torch::Tensor out;
  double dropout_rate;
  int runs = 0;
};
TORCH_MODULE(Segment);

// How a stack of segments is run.
using Way = std::function<torch::Tensor(Segment, const torch::Tensor&)>;

torch::Tensor Plainly(Segment segment, const torch::Tensor& x) { return segment->forward(x); }
torch::Tensor Recomputed(Segment segment, const torch::Tensor& x) {
  return recompute([segment](const torch::Tensor& y) mutable { return segment->forward(y); }, x);
}

// The input's gradient and then the parameters' of one backward() through the segments.
Tensors GradientsOf(const std::vector<Segment>& segments, const Way& way) {
  torch::manual_seed(5);
  auto x = Waves({4, 5}, 9).requires_grad_();
  auto y = x;
  for (const Segment& segment : segments) y = way(segment, y);
  y.square().sum().backward();
  Tensors gradients = {x.grad()};
  for (const Segment& segment : segments) {
    for (auto& parameter : segment->parameters()) {
      gradients.push_back(parameter.grad().clone());
      parameter.mutable_grad() = torch::Tensor();
    }
  }
  return gradients;
}

void ExpectEqual(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
}

TEST(RecomputeTest, GivesTheGradientsOfThePlainCallAndRunsTwice) {
  const std::vector<Segment> segments = {Segment(1), Segment(2), Segment(3)};
  const Tensors plain = GradientsOf(segments, Plainly);
  ExpectEqual(GradientsOf(segments, Recomputed), plain);
  EXPECT_EQ(segments[1]->runs, 1 + 2);
}

TEST(RecomputeTest, DropoutDropsTheSameAndLaterNumbersAreAsInThePlainRun) {
  const std::vector<Segment> segments = {Segment(1, 0.5), Segment(2, 0.5)};
  const Tensors plain = GradientsOf(segments, Plainly);
  const auto next = torch::rand({3});
  ExpectEqual(GradientsOf(segments, Recomputed), plain);
  EXPECT_TRUE(torch::equal(torch::rand({3}), next));
}

TEST(RecomputeTest, NestedSegmentsGiveTheSame) {
  const std::vector<Segment> segments = {Segment(1, 0.5), Segment(2, 0.5)};
  const Tensors plain = GradientsOf(segments, Plainly);
  const auto nested = [](Segment segment, const torch::Tensor& x) {
    return recompute([segment](const torch::Tensor& y) { return Recomputed(segment, y); }, x);
  };
  ExpectEqual(GradientsOf(segments, nested), plain);
}

TEST(RecomputeTest, KeepsNothingOfItsInsideUntilBackward) {
  c10::weak_intrusive_ptr<c10::StorageImpl> inside(c10::intrusive_ptr<c10::StorageImpl>{});
  const auto function = [&inside](const torch::Tensor& input) {
    const auto result = input.exp();  // autograd keeps it
    inside = result.storage().getWeakStorageImpl();
    return result.sum();
  };
  const auto x = torch::ones({3}).requires_grad_();
  const auto plain = function(x);
  EXPECT_FALSE(inside.expired());
  const auto y = recompute(function, x);
  EXPECT_TRUE(inside.expired());
}

TEST(RecomputeTest, TakesListsNumbersAndCapturedTensorsAndReturnsSeveral) {
  const auto function = [](const auto& captured) {
    return [captured](const Tensors& list, double factor, const torch::Tensor& constant) {
      return Tensors{(list[0] * list[1]).sin() * factor, constant + 1,
                     (list[1] * captured).cos() * constant, list[0]};
    };
  };
  const auto gradients = [&function](bool recomputed) {
    auto a = Waves({4}, 1).requires_grad_();
    auto b = Waves({4}, 2).requires_grad_();
    auto c = Waves({4}, 3).requires_grad_();
    const auto captured = c.exp();
    const auto constant = Waves({4}, 4);
    const Tensors list = {a, b};
    const auto run = function(captured);
    const Tensors results =
        recomputed ? recompute(run, list, 3.0, constant) : run(list, 3.0, constant);
    EXPECT_FALSE(results[1].requires_grad());
    EXPECT_TRUE(results[3].is_same(a)) << "what is passed on is passed on";
    (results[0] * results[2] + results[1] + captured + results[3]).sum().backward();
    return Tensors{results[0].detach(), results[2].detach(), a.grad(), b.grad(), c.grad()};
  };
  ExpectEqual(gradients(true), gradients(false));
}

TEST(RecomputeTest, WithoutAGradientToComputeItIsThePlainCall) {
  int runs = 0;
  const auto function = [&runs](const torch::Tensor& x) {
    ++runs;
    return x.exp();
  };
  EXPECT_FALSE(recompute(function, torch::ones({2})).requires_grad());
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(recompute(function, torch::ones({2}).requires_grad_()).requires_grad());
  EXPECT_EQ(runs, 2);
}

TEST(RecomputeTest, EachBackwardThatKeepsTheGraphRunsItAgain) {
  Segment segment(1);
  const auto y = Recomputed(segment, Waves({4, 5}, 2)).sum();
  y.backward({}, /*retain_graph=*/true);
  const auto once = segment->in.grad().clone();
  y.backward();
  EXPECT_TRUE(torch::equal(segment->in.grad(), once * 2));
  EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&y] { y.backward(); }),
              HasSubstr("give the first retain_graph"));
  EXPECT_EQ(segment->runs, 3);
}

TEST(RecomputeTest, GradientsOfGradientsAreThoseOfThePlainCall) {
  const auto gradients = [](const Way& way) {
    Segment segment(1);
    auto x = Waves({4, 5}, 9).requires_grad_();
    const auto upstream = x.exp();
    const auto y = way(segment, upstream).square().sum();
    const auto gradient = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true,
                                                /*create_graph=*/true)[0];
    EXPECT_FALSE(segment->in.grad().defined()) << "asked for that of the input alone";
    (y + gradient.square().sum()).backward();
    return Tensors{gradient.detach(), x.grad(), segment->in.grad(), segment->out.grad()};
  };
  const Tensors plain = gradients(Plainly);
  const Tensors recomputed = gradients(Recomputed);
  ASSERT_EQ(plain.size(), recomputed.size());
  EXPECT_TRUE(torch::equal(plain[0], recomputed[0]));
  EXPECT_LT(Distance(plain, recomputed), 1e-12);
}

TEST(RecomputeTest, HooksOfLeavesAreCalledOnceAndThoseOfTheInsideToo) {
  auto weight = Waves({4}, 1).requires_grad_();
  auto x = Waves({4}, 2).requires_grad_();
  int of_weight = 0;
  int of_inside = 0;
  weight.register_hook([&of_weight](const torch::Tensor& gradient) {
    ++of_weight;
    return gradient * 2;
  });
  const auto function = [&](const torch::Tensor& y) {
    const auto inside = y * weight;
    inside.register_hook([&of_inside](const torch::Tensor&) { ++of_inside; });
    return inside.sum();
  };
  (recompute(function, x) + recompute(function, x) + (weight * x).sum()).backward();
  EXPECT_TRUE(torch::allclose(weight.grad(), 6 * x.detach()));
  EXPECT_EQ(of_weight, 1);
  EXPECT_EQ(of_inside, 2);
}

TEST(RecomputeTest, BackwardOfAnotherThreadComputesTheSame) {
  Segment segment(1);
  auto x = Waves({4, 5}, 9).requires_grad_();
  Plainly(segment, x.exp()).sum().backward();
  const Tensors plain = {x.grad(), segment->in.grad(), segment->out.grad()};
  x.mutable_grad() = torch::Tensor();
  segment->zero_grad();
  const auto y = Recomputed(segment, x.exp()).sum();
  std::thread([&y] { y.backward(); }).join();  // where numbers of nodes begin with 0
  ExpectEqual({x.grad(), segment->in.grad(), segment->out.grad()}, plain);
}

TEST(RecomputeTest, RunsUnderTheAutocastOfTheFirstRun) {
  std::vector<torch::ScalarType> types;
  auto weight = Waves({5, 5}, 1).to(torch::kFloat).requires_grad_();
  const auto function = [&](const torch::Tensor& x) {
    const auto y = x.matmul(weight);
    types.push_back(y.scalar_type());
    return torch::tanh(y).matmul(weight).sum();
  };
  const auto x = Waves({4, 5}, 2).to(torch::kFloat);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto before = x.matmul(weight).sum();  // leaves the weight in autocast's cache
  const auto y = recompute(function, x) + before;
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  y.backward();
  EXPECT_EQ(types, std::vector<torch::ScalarType>(2, torch::kBFloat16));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_EQ(weight.grad().scalar_type(), torch::kFloat);
}

TEST(RecomputeTest, OutputsMayBeChangedInPlace) {
  const auto gradient = [](bool recomputed) {
    auto x = Waves({4}, 2).requires_grad_();
    const auto function = [](const torch::Tensor& y) { return Tensors{y * 3, y.view({2, 2})}; };
    Tensors results = recomputed ? recompute(function, x) : function(x);
    results[0].mul_(2);
    EXPECT_TRUE(torch::equal(results[1].flatten(), x));
    (results[0].sum() + results[1].sum()).backward();
    return x.grad();
  };
  EXPECT_TRUE(torch::equal(gradient(true), gradient(false)));
}

// ---- what cannot be run again is refused ----

std::string WhyBackwardFails(const torch::Tensor& y) {
  return ErrorOf(ErrorCode::InvalidArgument, [&y] { y.sum().backward(); });
}

// The graph of a view that is changed in place by something from outside has a node within a node.
TEST(RecomputeTest, TheFunctionMayChangeViewsOfItsOwnInPlace) {
  using Function = std::function<torch::Tensor(const torch::Tensor&, const torch::Tensor&)>;
  const std::vector<Function> functions = {[](const torch::Tensor& x, const torch::Tensor& w) {
                                             auto y = torch::linear(
                                                 x, w, w.sum(0));  // a view of a product
                                             y += x;
                                             return y;
                                           },
                                           [](const torch::Tensor& x, const torch::Tensor& w) {
                                             auto padded = torch::zeros({2, 5, 4}, torch::kDouble);
                                             padded.slice(1, 1, 4).copy_(x);
                                             return padded.matmul(w);
                                           },
                                           [](const torch::Tensor& x, const torch::Tensor& w) {
                                             auto y = x.matmul(w);
                                             y.view({6, 4}).add_(w.sum(0)).mul_(x.view({6, 4}));
                                             return y.tanh();
                                           }};
  for (const Function& function : functions) {
    Tensors gradients;
    for (const bool again : {false, true}) {
      const auto x = Waves({2, 3, 4}, 1).requires_grad_();
      const auto w = Waves({4, 4}, 2).requires_grad_();
      const auto input = x * 2;
      const auto y = again ? recompute(function, input, w) : function(input, w);
      y.square().sum().backward();
      gradients.insert(gradients.end(), {x.grad(), w.grad()});
    }
    EXPECT_TRUE(torch::allclose(gradients[0], gradients[2]));
    EXPECT_TRUE(torch::allclose(gradients[1], gradients[3]));
  }
}

TEST(RecomputeTest, InputsMayBeSparseOrViewsWhoseBaseWasChanged) {
  const auto pairs = torch::sparse_coo_tensor(
      torch::tensor({{0, 1}, {1, 0}}), torch::ones({2}, torch::kDouble), torch::IntArrayRef{2, 2});
  const auto x = Waves({2, 3}, 1).requires_grad_();
  recompute([](const torch::Tensor& a, const torch::Tensor& b) { return a.mm(b).exp(); }, pairs, x)
      .sum()
      .backward();
  EXPECT_TRUE(torch::allclose(x.grad(), x.detach().exp()));

  auto base = x * 1;
  const auto view = base.narrow(0, 0, 1);
  base.mul_(2);
  x.mutable_grad() = torch::Tensor();
  recompute([](const torch::Tensor& y) { return y * 3; }, view).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::tensor({{6, 6, 6}, {0, 0, 0}}, torch::kDouble)));
}

TEST(RecomputeTest, AnOutputThatIsAViewOfACapturedTensorIsACopy) {
  const auto x = torch::ones({3}).requires_grad_();
  const auto captured = x * 2;
  auto y = recompute([captured] { return captured.view({3, 1}); });
  y.mul_(3);
  EXPECT_EQ(captured[0].item<double>(), 2);
  (y.sum() + captured.sum()).backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({3}, 8.0F)));
}

TEST(RecomputeTest, WhatWasChangedInPlaceIsNamed) {
  Segment segment(1);
  const auto x = Waves({4, 5}, 2);
  auto y = Recomputed(segment, x);
  x.add_(1);
  EXPECT_THAT(WhyBackwardFails(y),
              AllOf(HasSubstr("double[4, 5]"), HasSubstr("was changed in place")));
  y = Recomputed(segment, x);
  {
    const torch::NoGradGuard no_grad;
    segment->out.mul_(0.9);
  }
  EXPECT_THAT(WhyBackwardFails(y), HasSubstr("double[7, 5]"));
  const auto function = [&segment](const torch::Tensor& input) {
    return segment->forward(input.mul_(2));
  };
  EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { recompute(function, x); }),
              HasSubstr("the function itself has"));
}

TEST(RecomputeTest, ASecondRunThatDoesSomethingElseIsRefused) {
  auto weight = Waves({4}, 1).requires_grad_();
  auto other = Waves({4}, 2).requires_grad_();
  int runs = 0;
  const auto first_run = [&runs] { return runs++ % 2 == 0; };
  const auto x = Waves({4}, 3);
  EXPECT_THAT(
      WhyBackwardFails(recompute(
          [&](const torch::Tensor& y) { return (y * weight).slice(0, 0, first_run() ? 4 : 3); },
          x)),
      AllOf(HasSubstr("double[3]"), HasSubstr("double[4] at first")));
  EXPECT_THAT(WhyBackwardFails(recompute(
                  [&](const torch::Tensor& y) { return y * (first_run() ? weight : other); }, x)),
              HasSubstr("has used other tensors"));
  EXPECT_THAT(
      WhyBackwardFails(recompute(
          [&](const torch::Tensor& y) { return first_run() ? y * weight + other : y * weight; },
          x)),
      HasSubstr("has used other tensors"));
  EXPECT_THAT(WhyBackwardFails(recompute(
                  [&](const torch::Tensor& y) { return first_run() ? y * weight : y * 2; }, x)),
              HasSubstr("without a graph"));
  EXPECT_THAT(
      WhyBackwardFails(
          recompute(
              [&](const torch::Tensor& y) { return Tensors(first_run() ? 2 : 1, y * weight); }, x)
              .front()),
      HasSubstr("1 tensors in backward(), and at first 2"));
}

// ---- beside the optimizer ----

// One net of segments, of which two share their parameters, and a loss that uses them outside too.
Tensors TrainSegments(const Way& way, int rank, const DistributedOptimizerOptions& options) {
  Segment shared(1);
  Segment own(2);
  const std::vector<std::pair<std::string, torch::Tensor>> named = {{"shared.in", shared->in},
                                                                    {"shared.out", shared->out},
                                                                    {"own.in", own->in},
                                                                    {"own.out", own->out}};
  Tensors parameters;
  for (const auto& [name, parameter] : named) parameters.push_back(parameter);
  auto optimizer = DistributedOptimizer(
      torch::optim::SGD(parameters, torch::optim::SGDOptions(0.01)), named, options);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < options.backward_passes_per_step(); ++pass) {
      const auto x = BatchOfRank(step + 10 * pass, rank).x;
      const auto y = way(shared, way(own, way(shared, x)));
      (y.square().mean() + shared->out.square().sum()).backward();
    }
    optimizer.step();
  }
  return parameters;
}

TEST(RecomputeTest, ParametersOfSeveralSegmentsAreAveragedOnceWhenComplete) {
  using Options = DistributedOptimizerOptions;
  const std::vector<Options> all = {
      Options(), Options().average_at(Average::Step), Options().op(ReduceOp::Sum),
      Options().average_at(Average::Step).backward_passes_per_step(2)};
  for (const Options& options : all) {
    std::vector<Tensors> plain(2);
    std::vector<Tensors> recomputed(2);
    RunTorchRanks(2, [&](int rank) {
      const auto place = static_cast<std::size_t>(rank);
      plain[place] = TrainSegments(Plainly, rank, options);
      recomputed[place] = TrainSegments(Recomputed, rank, options);
    });
    for (int rank = 0; rank < 2; ++rank) {
      const auto place = static_cast<std::size_t>(rank);
      EXPECT_EQ(Distance(recomputed[place], recomputed[0]), 0);
      EXPECT_LT(Distance(recomputed[place], plain[place]), 1e-12);
      EXPECT_GT(Distance(recomputed[place], Tensors(4, torch::zeros({}))), 0.01);
    }
  }
}

struct SharingNet : torch::nn::Module {
  explicit SharingNet(Way way) : way_(std::move(way)) { register_module("shared", shared); }
  torch::Tensor forward(const torch::Tensor& x) { return way_(shared, way_(shared, x)); }
  Segment shared{1};

 private:
  Way way_;
};

TEST(RecomputeTest, AWrappedModuleAveragesOnceToo) {
  RunTorchRanks(2, [](int rank) {
    const auto gradients = [&](const Way& way) {
      auto net = DistributedDataParallel(std::make_shared<SharingNet>(way),
                                         DistributedDataParallelOptions());
      net.forward(BatchOfRank(0, rank).x).square().mean().backward();
      return Tensors{net->shared->in.grad(), net->shared->out.grad()};
    };
    ExpectEqual(gradients(Recomputed), gradients(Plainly));
  });
}

TEST(RecomputeTest, CollectivesWithinItAreCalledAgain) {
  RunTorchRanks(2, [&](int rank) {
    const auto gradient = [&](bool recomputed) {
      auto x = Waves({4}, rank).requires_grad_();
      const auto function = [](const torch::Tensor& y) {
        return allreduce(y.exp(), AllreduceOptions().op(ReduceOp::Sum)).square().sum();
      };
      (recomputed ? recompute(function, x) : function(x)).backward();
      return x.grad();
    };
    EXPECT_TRUE(torch::equal(gradient(true), gradient(false)));
  });
}

}  // namespace
}  // namespace sirtaki::tests
