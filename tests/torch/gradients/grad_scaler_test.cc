#include "sirtaki/grad_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <sstream>
#include <string>

#include "sirtaki/barrier.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/process_set.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

GradScalerOptions Small() { return GradScalerOptions().init_scale(8).growth_interval(2); }

TEST(GradScalerTest, TrainsAsWithoutIt) {
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    RunTorchRanks(2, [type](int rank) {
      SmallNet plain;
      SmallNet scaled;
      plain.to(type);
      scaled.to(type);
      DistributedOptimizer<SGD> reference(SGD(plain.parameters(), SGDOptions(0.1)),
                                          plain.named_parameters());
      DistributedOptimizer<SGD> optimizer(SGD(scaled.parameters(), SGDOptions(0.1)),
                                          scaled.named_parameters());
      GradScaler scaler(Small());
      for (int step = 0; step < 6; ++step) {
        const Batch batch = BatchOfRank(step, rank);
        const Batch typed{batch.x.to(type), batch.y.to(type)};
        reference.zero_grad();
        optimizer.zero_grad();
        Loss(plain, typed).backward();
        scaler.scale(Loss(scaled, typed)).backward();
        reference.step();
        EXPECT_TRUE(scaler.step(optimizer));
        scaler.update();
        EXPECT_EQ(Distance(plain.parameters(), scaled.parameters()), 0)
            << "scales are powers of two";
      }
      EXPECT_EQ(scaler.get_scale(), 64);
    });
  }
}

TEST(GradScalerTest, InfinityOnOneRankSkipsTheStepOnAll) {
  RunTorchRanks(3, [](int rank) {
    auto weight = torch::zeros({2}, torch::requires_grad());
    DistributedOptimizer<SGD> optimizer(SGD({weight}, SGDOptions(1.0)),
                                        NamedTensors{{"w", weight}});
    GradScaler scaler(Small());
    for (const double slope : {kInfinity, std::numeric_limits<double>::quiet_NaN(), 1.0}) {
      optimizer.zero_grad();
      scaler.scale(weight.sum() * (rank == 1 ? slope : 1.0)).backward();
      EXPECT_EQ(scaler.step(optimizer), slope == 1.0);
      scaler.update();
    }
    EXPECT_EQ(scaler.get_scale(), 2);
    EXPECT_TRUE(torch::equal(weight.detach(), torch::full({2}, -1.0f)));
  });
}

// A plain optimizer's gradients are each rank's own; the ranks still agree.
TEST(GradScalerTest, AgreesAlsoForGradientsThatAreNotAveraged) {
  RunTorchRanks(2, [](int rank) {
    auto weight = torch::zeros({1}, torch::requires_grad());
    SGD optimizer({weight}, SGDOptions(1.0));
    GradScaler scaler(Small());
    scaler.scale(weight.sum() * (rank == 0 ? kInfinity : 1.0)).backward();
    EXPECT_FALSE(scaler.step(optimizer));
    EXPECT_EQ(weight.item<float>(), 0);
  });
}

TEST(GradScalerTest, UnscaledGradientsMayBeClipped) {
  RunTorchRanks(2, [](int rank) {
    auto weight = torch::zeros({1}, torch::requires_grad());
    DistributedOptimizer<SGD> optimizer(SGD({weight}, SGDOptions(1.0)),
                                        NamedTensors{{"w", weight}});
    GradScaler scaler(Small());
    scaler.scale(weight.sum() * 2 * rank).backward();
    scaler.unscale_(optimizer);
    EXPECT_EQ(weight.grad().item<float>(), 1);
    EXPECT_NEAR(clip_grad_norm_(optimizer, 0.5), 1, 1e-6);
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_NEAR(weight.item<float>(), -0.5, 1e-5);
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { scaler.unscale_(optimizer); }),
                HasSubstr("unscale_() was already called"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { scaler.step(optimizer); }),
                HasSubstr("step() was already called"));
    scaler.update();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { scaler.update(); }),
                HasSubstr("update() needs a step()"));
  });
}

TEST(GradScalerTest, SettingsThatDifferAreNamedOnEveryRank) {
  RunTorchRanks(2, [](int rank) {
    auto weight = torch::zeros({1}, torch::requires_grad());
    DistributedOptimizer<SGD> optimizer(SGD({weight}, SGDOptions(1.0)),
                                        NamedTensors{{"w", weight}});
    const auto refused = [&](const GradScalerOptions& options) {
      GradScaler scaler(options);
      optimizer.zero_grad();
      scaler.scale(weight.sum()).backward();
      const auto text = ErrorOf(ErrorCode::Mismatch, [&] { scaler.step(optimizer); });
      optimizer.synchronize();
      return text;
    };
    EXPECT_THAT(refused(Small().init_scale(1 + rank)), HasSubstr("scale 2, "));
    EXPECT_THAT(refused(Small().growth_interval(1 + rank)), HasSubstr("after 2 steps"));
    EXPECT_THAT(refused(Small().enabled(rank == 0)), HasSubstr("disabled on rank 1"));
    GradScaler scaler(Small());
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update(4 + rank);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { scaler.step(optimizer); }),
                HasSubstr("from 4.000000 to 5.000000"));
    scaler.broadcast(1);
    EXPECT_TRUE(scaler.step(optimizer));
  });
}

// A step of the set skips its ranks alone, and the scale is that of all of their optimizers.
TEST(GradScalerTest, ScalesThatHaveDriftedApartAreFound) {
  RunTorchRanks(2, [](int rank) {
    const ProcessSet of_one = add_process_set({1});
    auto weight = torch::zeros({1}, torch::requires_grad());
    auto local = torch::zeros({1}, torch::requires_grad());
    DistributedOptimizer<SGD> optimizer(SGD({weight}, SGDOptions(1.0)),
                                        NamedTensors{{"w", weight}});
    GradScaler scaler(Small());
    const auto step = [&](double slope) {
      optimizer.zero_grad();
      scaler.scale(weight.sum()).backward();
      const bool made = scaler.step(optimizer);
      if (rank == 1) {
        DistributedOptimizer<SGD> other(SGD({local}, SGDOptions(1.0)), NamedTensors{{"l", local}},
                                        DistributedOptimizerOptions().process_set(of_one));
        scaler.scale(local.sum() * slope).backward();
        scaler.step(other);
      }
      scaler.update();
      return made;
    };
    EXPECT_TRUE(step(kInfinity));
    EXPECT_EQ(scaler.get_scale(), rank == 1 ? 4 : 8);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { step(1); }), HasSubstr("different scales"));
    EXPECT_EQ(weight.item<float>(), -1);
  });
}

TEST(GradScalerTest, AGradientOfTwoOptimizersIsDividedOnce) {
  RunTorchRanks(2, [](int) {
    auto weight = torch::zeros({1}, torch::requires_grad());
    const NamedTensors names{{"w", weight}};
    DistributedOptimizer<SGD> first(SGD({weight}, SGDOptions(1.0)), names);
    DistributedOptimizer<SGD> second(SGD({weight}, SGDOptions(1.0)), names);
    GradScaler scaler(Small());
    scaler.scale(weight.sum()).backward();
    scaler.unscale_(first);
    clip_grad_norm_(first, 0.5);
    EXPECT_TRUE(scaler.step(first));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { scaler.step(second); }),
                HasSubstr("divided by the scale already"));
    scaler.update();
    second.zero_grad();
    scaler.scale(weight.sum()).backward();
    EXPECT_TRUE(scaler.step(second));
    EXPECT_NEAR(weight.item<float>(), -1.5, 1e-5);
    // One after the other within an update, each by a backward() of its own.
    scaler.update();
    for (DistributedOptimizer<SGD>* one : {&first, &second}) {
      one->zero_grad(/*set_to_none=*/false);
      scaler.scale(weight.sum()).backward();
      EXPECT_TRUE(scaler.step(*one));
    }
    EXPECT_NEAR(weight.item<float>(), -3.5, 1e-5);
  });
}

TEST(GradScalerTest, OneOptimizerOfTwoIsSkipped) {
  RunTorchRanks(2, [](int) {
    auto a = torch::zeros({1}, torch::requires_grad());
    auto b = torch::zeros({1}, torch::requires_grad());
    DistributedOptimizer<SGD> first(SGD({a}, SGDOptions(1.0)), NamedTensors{{"a", a}});
    DistributedOptimizer<SGD> second(SGD({b}, SGDOptions(1.0)), NamedTensors{{"b", b}});
    GradScaler scaler(Small());
    scaler.scale(a.sum() + b.sum() * kInfinity).backward();
    EXPECT_TRUE(scaler.step(first));
    EXPECT_FALSE(scaler.step(second));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4) << "one bad gradient lowers the scale of all";
  });
}

// A skipped step is a step: what was averaged for it is not taken for the next one's.
TEST(GradScalerTest, AfterASkippedStepRanksMayUseOtherParameters) {
  RunTorchRanks(2, [](int rank) {
    auto a = torch::zeros({1}, torch::requires_grad());
    auto elsewhere = torch::zeros({1}, torch::requires_grad());
    DistributedOptimizer<SGD> optimizer(SGD({a}, SGDOptions(1.0)), NamedTensors{{"a", a}});
    GradScaler scaler(Small());
    scaler.scale(a.sum() * kInfinity).backward();
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    a.mutable_grad() = torch::Tensor();  // not by the optimizer's zero_grad()
    scaler.scale((rank == 0 ? a : elsewhere).sum()).backward();
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_EQ(a.item<float>(), -0.5f);
  });
}

TEST(GradScalerTest, Float64GradientsKeepTheirDigits) {
  RunTorchRanks(2, [](int) {
    auto weight = torch::zeros({1}, torch::TensorOptions(torch::kDouble).requires_grad(true));
    DistributedOptimizer<SGD> optimizer(SGD({weight}, SGDOptions(1.0)),
                                        NamedTensors{{"w", weight}});
    GradScaler scaler(GradScalerOptions().init_scale(3));
    scaler.scale(weight.sum()).backward();
    scaler.step(optimizer);
    EXPECT_EQ(weight.item<double>(), -1);
  });
}

TEST(GradScalerTest, StateIsSavedAndLoaded) {
  RunTorchRanks(1, [](int) {
    auto weight = torch::zeros({1}, torch::requires_grad());
    SGD optimizer({weight}, SGDOptions(1.0));
    GradScaler scaler(GradScalerOptions().init_scale(4).growth_interval(3));
    for (int i = 0; i < 2; ++i) {
      scaler.step(optimizer);
      scaler.update();
    }
    std::stringstream stream;
    torch::serialize::OutputArchive out;
    scaler.save(out);
    out.save_to(stream);
    GradScaler loaded(GradScalerOptions().growth_interval(3));
    torch::serialize::InputArchive in;
    in.load_from(stream);
    loaded.load(in);
    EXPECT_EQ(loaded.get_scale(), 4);
    loaded.step(optimizer);
    loaded.update();
    EXPECT_EQ(loaded.get_scale(), 8) << "the third good step in a row";
  });
}

TEST(GradScalerTest, DisabledItDoesNothing) {
  RunTorchRanks(2, [](int rank) {
    auto weight = torch::zeros({1}, torch::requires_grad());
    DistributedOptimizer<SGD> optimizer(SGD({weight}, SGDOptions(1.0)),
                                        NamedTensors{{"w", weight}});
    GradScaler scaler(GradScalerOptions().enabled(false));
    EXPECT_EQ(scaler.get_scale(), 1);
    scaler.scale(weight.sum() * rank).backward();
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(weight.item<float>(), -0.5f);
  });
}

TEST(GradScalerTest, WhatIsNotAllowedIsNamed) {
  RunTorchRanks(1, [](int) {
    const auto refused = [&](const GradScalerOptions& options) {
      return ErrorOf(ErrorCode::InvalidArgument, [&] { GradScaler scaler(options); });
    };
    EXPECT_THAT(refused(GradScalerOptions().init_scale(0)), HasSubstr("init_scale is 0"));
    EXPECT_THAT(refused(GradScalerOptions().growth_factor(1)), HasSubstr("growth_factor is 1"));
    EXPECT_THAT(refused(GradScalerOptions().backoff_factor(1)), HasSubstr("backoff_factor is 1"));
    EXPECT_THAT(refused(GradScalerOptions().growth_interval(0)), HasSubstr("growth_interval is 0"));
    GradScaler scaler(Small());
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { scaler.update(-1); }),
                HasSubstr("new scale is -1"));
    auto half = torch::zeros({1}, torch::TensorOptions(torch::kHalf).requires_grad(true));
    SGD optimizer({half}, SGDOptions(1.0));
    half.sum().backward();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { scaler.step(optimizer); }),
                HasSubstr("float16"));
    scaler.update(16);
    EXPECT_EQ(scaler.get_scale(), 16);
  });
}

// A module gives a parameter that it has under two names twice.
TEST(GradScalerTest, AParameterThatStandsTwiceIsUnscaledAndClippedOnce) {
  RunTorchRanks(2, [](int) {
    const auto weight = torch::zeros({2}, torch::requires_grad());
    DistributedOptimizer<SGD> optimizer(SGD({weight, weight}, SGDOptions(1.0)),
                                        NamedTensors{{"w", weight}});
    GradScaler scaler(Small());
    optimizer.zero_grad();
    scaler.scale((weight * torch::tensor({3.0f, 4.0f})).sum()).backward();
    scaler.unscale_(optimizer);
    EXPECT_TRUE(torch::equal(weight.grad(), torch::tensor({3.0f, 4.0f})));
    EXPECT_NEAR(clip_grad_norm_(optimizer, 1), 5, 1e-6);
    EXPECT_NEAR(weight.grad().norm().item<double>(), 1, 1e-5);
  });
}

// A rank that has more batches makes steps that the other one's scaler does not see.
TEST(GradScalerTest, AfterAJoinTheScalesAreTakenFromOneRank) {
  RunTorchRanks(2, [](int rank) {
    const auto weight = torch::zeros({2}, torch::requires_grad());
    DistributedOptimizer<SGD> optimizer(SGD({weight}, SGDOptions(0.5)),
                                        NamedTensors{{"w", weight}});
    GradScaler scaler(Small());
    const auto step = [&](double slope) {
      optimizer.zero_grad();
      scaler.scale(weight.sum() * slope).backward();
      const bool made = scaler.step(optimizer);
      scaler.update();
      return made;
    };
    step(1);
    if (rank == 0) {
      EXPECT_FALSE(step(kInfinity));
    }
    EXPECT_EQ(join(), 0);
    EXPECT_THAT(
        ErrorOf(ErrorCode::Mismatch, [&] { step(1); }),
        testing::AllOf(HasSubstr("GradScaler"), HasSubstr("scale 4"), HasSubstr("scale 8")));
    optimizer.zero_grad();
    scaler.broadcast(0);
    EXPECT_EQ(scaler.get_scale(), 4);
    EXPECT_TRUE(step(1));
  });
}

}  // namespace
}  // namespace sirtaki::tests
