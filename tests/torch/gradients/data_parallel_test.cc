#include "sirtaki/data_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/torch/gradients/backward_average.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using DdpOptions = DistributedDataParallelOptions;

TEST(DataParallelTest, FollowsOneProcessFromTheWeightsOfRankZero) {
  for (const int size : {1, 2, 3}) {
    const auto make = [](std::vector<torch::Tensor> p) {
      return torch::optim::Adam(std::move(p), torch::optim::AdamOptions(0.01));
    };
    const auto expected = TrainAlone(make, 10, size);
    RunTorchRanks(size, [&](int rank) {
      auto net = std::make_shared<SmallNet>();
      if (rank > 0) {
        torch::NoGradGuard no_grad;
        for (auto& parameter : net->parameters()) parameter.fill_(rank);
      }
      DistributedDataParallel<SmallNet> model(net);
      auto optimizer = make(model.parameters());
      for (int step = 0; step < 10; ++step) {
        const Batch batch = BatchOfRank(step, rank);
        optimizer.zero_grad();
        torch::mse_loss(model(batch.x), batch.y).backward();
        optimizer.step();
      }
      EXPECT_LT(Distance(net->parameters(), expected), 1e-11) << size << " ranks";
    });
  }
}

TEST(DataParallelTest, GradientsAreAveragedWhenBackwardReturns) {
  RunTorchRanks(2, [](int rank) {
    torch::nn::Linear layer(1, 1);
    DistributedDataParallel model(layer);
    model.forward(torch::full({1, 1}, 4.0f * static_cast<float>(rank))).sum().backward();
    EXPECT_EQ(layer->weight.grad().item<float>(), 2);
    EXPECT_EQ(layer->bias.grad().item<float>(), 1);
    EXPECT_EQ(model->bias.grad().item<float>(), 1);
  });
}

TEST(DataParallelTest, AccumulatesWithinNoSync) {
  RunTorchRanks(2, [](int rank) {
    torch::nn::Linear layer(1, 1);
    DistributedDataParallel model(layer);
    const auto x = torch::full({1, 1}, static_cast<float>(rank));
    {
      const auto hold = model.no_sync();
      model(x).sum().backward();
      EXPECT_EQ(layer->weight.grad().item<float>(), static_cast<float>(rank)) << "still its own";
    }
    model(x).sum().backward();
    EXPECT_EQ(layer->weight.grad().item<float>(), 1);
    model(x).sum().backward();  // without zero_grad: adds to the average
    EXPECT_EQ(layer->weight.grad().item<float>(), 1.5f);
  });
}

struct Branches : torch::nn::Module {
  Branches() {
    a = register_parameter("a", torch::ones({2}));
    b = register_parameter("b", torch::ones({2}));
    c = register_parameter("c", torch::ones({2}));
  }
  torch::Tensor forward(bool uses_b) { return uses_b ? (a * b).sum() : a.sum(); }
  torch::Tensor a;
  torch::Tensor b;
  torch::Tensor c;
};

TEST(DataParallelTest, GraphsMayDiffer) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<Branches>();
    DistributedDataParallel<Branches> model(net);
    for (int step = 0; step < 4; ++step) {
      model.zero_grad();
      model.forward((step + rank) % 2 == 0).backward();
      EXPECT_TRUE(torch::equal(net->b.grad(), torch::full({2}, 0.5f)));
      EXPECT_FALSE(net->c.grad().defined());
    }
  });
}

TEST(DataParallelTest, ParametersUnfrozenLaterAreFound) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<Branches>();
    net->b.requires_grad_(false);
    DistributedDataParallel<Branches> model(net);
    model.forward(true).backward();
    net->b.requires_grad_(true);
    (model.forward(true) * (rank + 1)).backward();
    EXPECT_TRUE(torch::equal(net->b.grad(), torch::full({2}, 1.5f)));
  });
}

struct Counting : torch::nn::Module {
  Counting() {
    weight = register_parameter("weight", torch::ones({1}));
    count = register_buffer("count", torch::zeros({1}));
  }
  torch::Tensor forward(float step) {
    seen = count.item<float>();
    count.add_(step);
    return weight.sum();
  }
  torch::Tensor weight;
  torch::Tensor count;
  float seen = -1;
};

TEST(DataParallelTest, BuffersAreThoseOfRankZero) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<Counting>();
    DistributedDataParallel<Counting> model(net);
    model.forward(static_cast<float>(1 + rank));
    EXPECT_EQ(net->seen, 0);
    model.forward(static_cast<float>(1 + rank));
    EXPECT_EQ(net->seen, 1) << "not what this rank has counted";
    model.eval();
    const float own = net->count.item<float>();
    if (rank == 0) model.forward(1);  // in evaluation each rank for itself
    EXPECT_EQ(net->count.item<float>(), own + (rank == 0 ? 1.0f : 0.0f));
  });
}

TEST(DataParallelTest, BuffersStayByChoice) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<Counting>();
    DistributedDataParallel<Counting> model(net, DdpOptions().broadcast_buffers(false));
    model.forward(static_cast<float>(1 + rank));
    model.forward(0);
    EXPECT_EQ(net->seen, static_cast<float>(1 + rank));
  });
}

// A backward() that fails half-way leaves gradients under way; the next forward() ends them.
TEST(DataParallelTest, ABackwardThatFailedIsCleanedUpByTheNextForward) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<Branches>();
    DistributedDataParallel<Branches> model(net);
    const auto output = model.forward(true);
    // b's part of the graph is reached first and done, a's fails.
    auto loss = (FailingBackward::apply(net->a) * 2).sum() + net->b.sum() + output * 0;
    EXPECT_THROW(loss.backward(), std::exception);
    model.zero_grad();
    const auto again = model.forward(true);
    model.zero_grad();
    (again * (rank + 1)).backward();
    EXPECT_TRUE(torch::equal(net->a.grad(), torch::full({2}, 1.5f)));
    EXPECT_TRUE(torch::equal(net->b.grad(), torch::full({2}, 1.5f)));
  });
}

TEST(DataParallelTest, TheOptimizerMustNotAverageAgain) {
  RunTorchRanks(2, [](int) {
    auto net = std::make_shared<Branches>();
    DistributedDataParallel<Branches> model(net);
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          DistributedOptimizer<SGD>(SGD(net->parameters(), SGDOptions(1.0)),
                                                    net->named_parameters());
                        }),
                AllOf(HasSubstr("\"a\""), HasSubstr("an optimizer that does not")));
  });
}

TEST(DataParallelTest, WhatAModuleCannotDoIsRefused) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<Branches>();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          DistributedDataParallel<Branches>(
                              net, DdpOptions().gradients(
                                       DistributedOptimizerOptions().backward_passes_per_step(2)));
                        }),
                AllOf(HasSubstr("backward_passes_per_step is 2"), HasSubstr("no_sync()")));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] { DistributedDataParallel<Branches>(std::shared_ptr<Branches>()); }),
                HasSubstr("null pointer"));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          DistributedDataParallel<Branches>(
                              net, DdpOptions().broadcast_buffers(rank == 0));
                        }),
                HasSubstr("without buffers on rank 1"));
  });
}

// A sum to which a second backward() adds would be summed again.
TEST(DataParallelTest, WhatCannotBeAveragedAgainIsRefused) {
  const auto hook = [](const GradientBucket& bucket) {
    return [buffer = bucket.buffer.clone()] { return buffer; };
  };
  for (const auto& options : {DistributedOptimizerOptions().op(ReduceOp::Sum),
                              DistributedOptimizerOptions().compression(Compression::BF16),
                              DistributedOptimizerOptions().hook(hook)}) {
    RunTorchRanks(2, [&](int) {
      auto net = std::make_shared<Branches>();
      DistributedDataParallel<Branches> model(net, DdpOptions().gradients(options));
      const float once = options.op() == ReduceOp::Sum ? 2 : 1;
      for (const bool keeps_memory : {false, true}) {
        model.forward(true).backward();
        if (keeps_memory) {
          for (const auto& parameter : {net->a, net->b}) parameter.grad().mul_(0.5);
        }
        EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { model.forward(true).backward(); }),
                    AllOf(HasSubstr("holds an average"), HasSubstr("no_sync()")));
        model.zero_grad(!keeps_memory);
        // What the second does not reach stays as it is.
        model.forward(true).backward();
        net->a.mutable_grad().reset();
        model.forward(false).backward();
        EXPECT_TRUE(torch::equal(net->a.grad(), torch::full({2}, once)));
        EXPECT_TRUE(torch::equal(net->b.grad(), torch::full({2}, once)));
        model.zero_grad(!keeps_memory);
      }
    });
  }
}

// torch's foreach functions zero gradients so on a GPU.
TEST(DataParallelTest, AGradientMayBeZeroedWithoutATrace) {
  RunTorchRanks(2, [](int) {
    auto net = std::make_shared<Branches>();
    DistributedDataParallel<Branches> model(
        net, DdpOptions().gradients(DistributedOptimizerOptions().op(ReduceOp::Sum)));
    for (int step = 0; step < 4; ++step) {
      const bool accumulates = step % 2 == 1;
      if (accumulates) {
        const auto hold = model.no_sync();
        model.forward(true).backward();
      }
      model.forward(true).backward();
      EXPECT_TRUE(torch::equal(net->a.grad(), torch::full({2}, accumulates ? 4.0f : 2.0f)));
      const auto version = net->a.grad()._version();
      for (const auto& parameter : {net->a, net->b}) parameter.grad().variable_data().zero_();
      EXPECT_EQ(net->a.grad()._version(), version);
    }
  });
}

TEST(DataParallelTest, TwoBackwardOnOneRankAreNoTwoSteps) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<Branches>();
    DistributedDataParallel<Branches> model(net);
    for (int round = 0; round < 2; ++round) {
      model.zero_grad();
      auto loss = model.forward(true);
      loss.backward({}, /*retain_graph=*/true);
      EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                          [&] {
                            if (rank == 1) loss = model.forward(true);  // the next step
                            loss.backward();
                          }),
                  AllOf(HasSubstr("backward() number 2 after forward() on rank 0"),
                        HasSubstr("no_sync()")));
    }
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      auto loss = model.forward(true) * (rank + 1);
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      EXPECT_TRUE(torch::equal(net->b.grad(), torch::full({2}, 3.0f)));
    }
  });
}

TEST(DataParallelTest, ABackwardThatThrowsOnOneRankThrowsOnAll) {
  for (const int size : {1, 2, 3}) {
    RunTorchRanks(size, [size](int rank) {
      auto net = std::make_shared<Branches>();
      DistributedDataParallel<Branches> model(net);
      for (int round = 0; round < 2; ++round) {  // with and without buckets
        const auto on_path = rank == size - 1 ? FailingBackward::apply(net->c) : net->c;
        const auto loss = on_path.sum() + model.forward(true);
        try {
          loss.backward();
          ADD_FAILURE() << "it did not throw";
        } catch (const std::exception& error) {
          EXPECT_THAT(error.what(),
                      HasSubstr(rank == size - 1 ? "no more memory" : "backward() has thrown"));
        }
        for (int step = 0; step < 3; ++step) {
          model.zero_grad();
          (model.forward(true) * (rank + 1)).backward();
          const float mean = static_cast<float>(size + 1) / 2;
          EXPECT_TRUE(torch::equal(net->b.grad(), torch::full({2}, mean)));
        }
      }
      model.zero_grad();
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                          [&] {
                            model.forward(true).pow(2).backward({}, /*retain_graph=*/true,
                                                                /*create_graph=*/true);
                          }),
                  HasSubstr("create_graph"));
      model.zero_grad();
    });
  }
}

TEST(DataParallelTest, ABackwardThatThrowsWithinAnother) {
  for (const int size : {1, 2, 3}) {
    RunTorchRanks(size, [size](int rank) {
      auto net = std::make_shared<Branches>();
      DistributedDataParallel<Branches> model(net);
      for (int round = 0; round < 2; ++round) {  // with and without buckets
        std::function<void()> run_inner = [&] {
          const torch::AutoGradMode with_graph(true);
          const auto on_path = rank == size - 1 ? FailingBackward::apply(net->c) : net->c;
          EXPECT_ANY_THROW((on_path.sum() + net->b.sum()).backward());
        };
        const auto x = torch::ones({1}, torch::requires_grad());
        const auto inner = Inner::apply(x, reinterpret_cast<std::int64_t>(&run_inner)).sum();
        EXPECT_ANY_THROW((inner + model.forward(true)).backward());
        for (int step = 0; step < 3; ++step) {
          model.zero_grad();
          (model.forward(true) * (rank + 1)).backward();
          EXPECT_TRUE(
              torch::equal(net->b.grad(), torch::full({2}, static_cast<float>(size + 1) / 2)));
        }
      }
    });
  }
}

// A rank that has no loss for a module adds 0 times the module's output.
TEST(DataParallelTest, ModulesInAnyOrderOrOnlyOneOfThem) {
  for (const int size : {2, 3}) {
    RunTorchRanks(size, [size](int rank) {
      torch::nn::Linear first(1, 1);
      torch::nn::Linear second(1, 1);
      DistributedDataParallel a(first);
      DistributedDataParallel b(second);
      for (int step = 0; step < 9; ++step) {
        a.zero_grad();
        b.zero_grad();
        const auto way_of = [step](int r) { return r == 0 ? 0 : (step + r) % 3; };
        const auto of_a = a.forward(torch::ones({1, 1})).sum() * (rank + 1);
        const auto of_b = b.forward(torch::ones({1, 1})).sum() * (rank + 1);
        const int way = way_of(rank);
        (way == 0 ? of_a + of_b : way == 1 ? of_b + of_a : of_b + 0 * of_a).backward();
        int a_sum = 0;
        for (int r = 0; r < size; ++r) a_sum += way_of(r) == 2 ? 0 : r + 1;
        EXPECT_FLOAT_EQ(first->bias.grad().item<float>(), static_cast<float>(a_sum) / size);
        EXPECT_FLOAT_EQ(second->bias.grad().item<float>(), static_cast<float>(size + 1) / 2);
      }
    });
  }
}

// The ends of two modules in one backward() come in any order.
TEST(DataParallelTest, ParametersOfSeveralModulesAreChecked) {
  RunTorchRanks(2, [](int rank) {
    const auto options =
        DdpOptions().gradients(DistributedOptimizerOptions().check_parameters_every(1));
    const auto make = [&](const char* name) {
      auto of_one = options;
      of_one.gradients(of_one.gradients().name(name));
      return std::make_unique<DistributedDataParallel<Branches>>(std::make_shared<Branches>(),
                                                                 of_one);
    };
    const auto a = make("a");
    const auto b = make("b");
    for (int step = 0; step < 2; ++step) {
      const auto of_a = a->forward(true);
      const auto of_b = b->forward(true);
      (rank == 0 ? of_a + of_b * 2 : of_b * 2 + of_a).backward();
    }
    if (rank == 1) {
      const torch::NoGradGuard no_grad;
      (*b)->a.add_(1);
    }
    // A rank may evaluate by itself.
    b->eval();
    if (rank == 0) b->forward(true);
    b->train();
    a->forward(true);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { b->forward(true); }),
                HasSubstr("parameters of the module#2"));
  });
}

TEST(DataParallelTest, AnAverageIsNotAveragedAgainAfterARankHasJoined) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<Branches>();
    DistributedDataParallel<Branches> model(net, DdpOptions());
    if (rank == 0) {
      model.forward(true).backward();
      EXPECT_TRUE(torch::equal(net->b.grad(), torch::full({2}, 0.5f)));
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { model.forward(true).backward(); }),
                  AllOf(HasSubstr("rank 1 has joined"), HasSubstr("no_sync()")));
    }
    join();
  });
}

struct Tied : torch::nn::Module {
  Tied() {
    weight = register_parameter("weight", torch::ones({2}));
    register_parameter("again", weight);
  }
  torch::Tensor forward() { return weight.sum(); }
  torch::Tensor weight;
};

TEST(DataParallelTest, TiedWeightsAreReducedOnce) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<Tied>();
    DistributedDataParallel<Tied> model(
        net, DdpOptions().gradients(DistributedOptimizerOptions().op(ReduceOp::Sum)));
    (model.forward() * (rank + 1)).backward();
    EXPECT_TRUE(torch::equal(net->weight.grad(), torch::full({2}, 3.0f)));
  });
}

struct SharedMask : torch::nn::Module {
  SharedMask() {
    weight = register_parameter("weight", torch::ones({2}));
    mask = register_buffer("mask", torch::ones({2}));
    register_buffer("again", mask);
  }
  torch::Tensor forward() { return (weight * mask).sum(); }
  torch::Tensor weight, mask;
};

TEST(DataParallelTest, ABufferThatTwoModulesHaveIsBroadcastOnce) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<SharedMask>();
    DistributedDataParallel<SharedMask> model(net);
    net->mask.fill_(5 + rank);
    EXPECT_EQ(model.forward().item<float>(), 10);
    EXPECT_TRUE(torch::equal(net->mask, torch::full({2}, 5.0f)));
  });
}

// What the first forward() has kept of batch norm stays usable, as a GAN's discriminator needs it.
TEST(DataParallelTest, TwoForwardsBeforeABackwardWithBatchNorm) {
  RunTorchRanks(2, [](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    DistributedDataParallel<torch::nn::SequentialImpl> model(net.ptr());
    const auto x = torch::arange(8, torch::kFloat).reshape({4, 2}) * (rank + 1);
    const torch::Tensor real = model->forward(x);
    const torch::Tensor fake = model.forward(x + 1);
    const torch::Tensor third = model.forward(x * x);
    (real.pow(2).mean() + fake.pow(2).mean() + third.pow(3).mean()).backward();
    EXPECT_TRUE(net->parameters()[0].grad().defined());
  });
}

TEST(DataParallelTest, ModelsThatDifferAreNamedOnEveryRank) {
  RunTorchRanks(2, [](int rank) {
    torch::nn::Linear layer(2, 2 + rank);
    EXPECT_THAT(
        ErrorOf(ErrorCode::Mismatch, [&] { DistributedDataParallel model(layer); }),
        AllOf(HasSubstr("\"weight\" float32 [2, 2] on rank 0"), HasSubstr("[3, 2] on rank 1")));
  });
}

TEST(DataParallelTest, AfterTheSessionForwardSaysSo) {
  using Parallel = DistributedDataParallel<torch::nn::LinearImpl>;
  std::vector<std::unique_ptr<Parallel>> models(2);
  RunTorchRanks(2, [&](int rank) {
    models.at(static_cast<std::size_t>(rank)) =
        std::make_unique<Parallel>(torch::nn::Linear(1, 1), DistributedDataParallelOptions());
  });
  for (const auto& model : models) {
    const auto x = torch::ones({1, 1});
    EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized, [&] { model->forward(x); }),
                HasSubstr("shut down"));
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(model->forward(x).numel(), 1);
  }
}

TEST(DataParallelTest, MayBeDestroyedBeforeItsGraph) {
  RunTorchRanks(2, [](int rank) {
    auto net = std::make_shared<Branches>();
    std::optional<DistributedDataParallel<Branches>> model;
    model.emplace(net, DdpOptions());
    const auto loss = model->forward(true) * (rank + 1);
    model.reset();
    loss.backward();
    EXPECT_TRUE(torch::equal(net->b.grad(), torch::full({2}, static_cast<float>(rank + 1))));
  });
}

}  // namespace
}  // namespace sirtaki::tests
