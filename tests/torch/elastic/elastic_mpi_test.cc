// RANKS: 2 3
// elastic::run() in a job whose ranks are fixed: it joins the job again after errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using elastic::HostsUpdated;
using elastic::State;
using testing::ElementsAre;
using testing::HasSubstr;
using torch::optim::SGD;
using torch::optim::SGDOptions;

class ElasticRunTest : public testing::Test {
 protected:
  void SetUp() override { init(InitOptions().set("stall_limit", "33s")); }
  void TearDown() override { shutdown(); }
};

constexpr int kElasticSteps = 5;

SGD MomentumSgd(std::vector<torch::Tensor> parameters) {
  return SGD(std::move(parameters), SGDOptions(0.1).momentum(0.9));
}

// Trains with commits every two steps. `fail` is called before a backward() at step 3 of the first call.
// Returns the steps with which the training has begun each time.
template <class Fail>
std::vector<int> TrainWithFailure(SmallNet& net, const Fail& fail) {
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  int step = 0;
  int changes = 0;
  std::vector<int> begun;
  State state =
      State().model(net).optimizer(optimizer).value("step", step).on_change([&] { ++changes; });
  const int done = elastic::run(state, [&] {
    begun.push_back(step);
    while (step < kElasticSteps) {
      optimizer.zero_grad();
      auto loss = Loss(net, BatchOfRank(step, rank()));
      if (step == 3 && begun.size() == 1) fail();
      loss.backward();
      optimizer.step();
      if (++step % 2 == 0) state.commit();
    }
    return step;
  });
  EXPECT_EQ(done, kElasticSteps);
  EXPECT_EQ(changes, 1);
  return begun;
}

void ExpectTrainedAsAlone(const SmallNet& net, int steps = kElasticSteps) {
  EXPECT_LT(Distance(net.parameters(), TrainAlone(&MomentumSgd, steps, size())), 1e-12);
  check_parameters(net);
}

TEST_F(ElasticRunTest, GoesBackToTheCommitWhenOneRankFails) {
  SmallNet net;
  EXPECT_THAT(TrainWithFailure(net,
                               [] {
                                 if (rank() != size() - 1) return;
                                 throw Error(ErrorCode::Backend, "on purpose");
                               }),
              ElementsAre(0, 2));
  ExpectTrainedAsAlone(net);
  // The options are those of the init() before.
  init(InitOptions().set("stall_limit", "33s"));
}

TEST_F(ElasticRunTest, GoesBackToTheCommitWhenBackwardThrowsAfterAnAbort) {
  SmallNet net;
  EXPECT_THAT(TrainWithFailure(net,
                               [] {
                                 if (rank() == size() - 1) abort("on purpose");
                               }),
              ElementsAre(0, 2));
  ExpectTrainedAsAlone(net);
}

TEST_F(ElasticRunTest, AnErrorThatComesThroughAutogradKeepsItsType) {
  const bool aborts = rank() == size() - 1;
  bool in_backward = false;
  try {
    SmallNet net;
    auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
    auto loss = Loss(net, BatchOfRank(0, rank()));
    if (aborts) abort("on purpose");  // the others may still make their optimizers
    in_backward = true;
    loss.backward();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Aborted);
    EXPECT_THAT(error.what(), HasSubstr("on purpose"));
    EXPECT_TRUE(in_backward || !aborts);
  }
}

TEST_F(ElasticRunTest, RestoresNothingWhenHostsChange) {
  SmallNet net;
  int step = 0;
  State state = State().model(net).value("step", step);
  std::vector<int> begun;
  const int result = elastic::run(state, [&] {
    begun.push_back(step);
    if (begun.size() == 1) {
      step = 4;
      throw HostsUpdated();
    }
    return step;
  });
  EXPECT_EQ(result, 4);
  EXPECT_THAT(begun, ElementsAre(0, 4));
}

TEST_F(ElasticRunTest, GivesUpWhatFailsEveryTime) {
  // A program that comes farther between two failures goes on.
  for (const auto come_farther : {&State::commit, &State::step}) {
    int calls = 0;
    int done = 0;
    State state = State().value("done", done);
    try {
      elastic::run(state, [&] {
        if (++calls == 2) {
          ++done;
          (state.*come_farther)();
        }
        throw Error(ErrorCode::TimedOut, "always");
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "always");
    }
    EXPECT_EQ(calls, 4);
  }
}

// A failure while the job is joined again is handled in the same way.
TEST_F(ElasticRunTest, GoesOnAfterAFailureInBetween) {
  SmallNet net;
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  int step = 0;
  int changes = 0;
  State state = State().model(net).optimizer(optimizer).value("step", step).on_change([&] {
    if (++changes == 1) throw Error(ErrorCode::PeerLost, "in between");
  });
  int calls = 0;
  elastic::run(state, [&] {
    if (++calls == 1) throw HostsUpdated();
    optimizer.zero_grad();
    Loss(net, BatchOfRank(0, rank())).backward();
    optimizer.step();
  });
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(changes, 2);
  check_parameters(net);
}

// A training that marks each step and commits one of them. `fail` is called with "before" and "within"
// the fourth step of the first call. Returns the steps with which the training has begun each time.
std::vector<int> TrainBySteps(const std::function<void(const std::string& when)>& fail) {
  constexpr int kSteps = 6;
  SmallNet net;
  torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(5).affine(false));
  norm->to(torch::kDouble);
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  int step = 0;
  std::vector<torch::Tensor> seen;
  State state = State()
                    .model(net)
                    .model(norm, "norm")
                    .optimizer(optimizer)
                    .value("step", step)
                    .value("seen", seen);
  std::vector<int> begun;
  std::vector<torch::Tensor> drawn(kSteps);
  torch::manual_seed(static_cast<std::uint64_t>(rank()));
  elastic::run(state, [&] {
    begun.push_back(step);
    const auto pass_by = [&](const char* when) {
      if (step == 3 && begun.size() == 1) fail(when);
    };
    while (step < kSteps) {
      seen.push_back(torch::full({1}, step));
      const Batch batch = BatchOfRank(step, rank());
      norm->forward(batch.x);
      optimizer.zero_grad();
      drawn[static_cast<std::size_t>(step)] = torch::rand({1});
      auto loss = Loss(net, batch);
      pass_by("before");
      loss.backward();
      optimizer.step();
      pass_by("within");
      ++step;
      state.step();
      if (step == 2) state.commit();
    }
  });
  EXPECT_TRUE(torch::cat(seen).equal(torch::arange(kSteps)));
  EXPECT_EQ(norm->num_batches_tracked.item<int>(), kSteps);
  torch::manual_seed(static_cast<std::uint64_t>(rank()));
  for (const torch::Tensor& one : drawn) EXPECT_TRUE(one.equal(torch::rand({1})));
  ExpectTrainedAsAlone(net, kSteps);
  return begun;
}

void FailAt(const std::string& here, const std::string& when, bool fails) {
  if (fails && here == when) throw Error(ErrorCode::Backend, "on purpose");
}

TEST_F(ElasticRunTest, GoesBackToTheLastStep) {
  for (const bool all : {true, false}) {
    EXPECT_THAT(TrainBySteps([all](const std::string& when) {
                  FailAt("before", when, all || rank() == size() - 1);
                }),
                ElementsAre(0, 3));
  }
}

// The state is that of a rank that is farther.
TEST_F(ElasticRunTest, AStepThatOneRankHasHalfMadeIsMadeByAll) {
  for (const int victim : {0, size() - 1}) {
    EXPECT_THAT(TrainBySteps([victim](const std::string& when) {
                  FailAt("within", when, rank() == victim);
                }),
                ElementsAre(0, 4));
  }
}

TEST_F(ElasticRunTest, GoesBackToTheCommitWhereAllHaveHalfMadeAStep) {
  EXPECT_THAT(TrainBySteps([](const std::string& when) { FailAt("within", when, true); }),
              ElementsAre(0, 2));
}

// On CPUs a step is whole when the optimizer has returned.
TEST_F(ElasticRunTest, AStepThatMeetsAFaultIsKept) {
  EXPECT_THAT(TrainBySteps([](const std::string& when) {
                if (when == "within") abort("on purpose");
              }),
              ElementsAre(0, 4));
}

// Marks a step, fails, and returns the steps with which the training has begun each time.
std::vector<int> FailAfterAStep(State state, const std::function<void()>& after_step = nullptr) {
  int step = 0;
  state.value("step", step);
  std::vector<int> begun;
  elastic::run(state, [&] {
    begun.push_back(step++);
    if (begun.size() > 1) return;
    state.step();
    if (after_step) after_step();
    throw Error(ErrorCode::Backend, "on purpose");
  });
  return begun;
}

TEST_F(ElasticRunTest, DrawsAreTheSameAgainIfTheyAreKept) {
  for (const bool keeps : {true, false}) {
    int step = 0;
    std::vector<torch::Tensor> drawn;
    torch::manual_seed(7);
    elastic::run(State().value("step", step).keep_random_state(keeps), [&] {
      drawn.push_back(torch::rand({1}));
      if (drawn.size() == 1) throw Error(ErrorCode::Backend, "on purpose");
    });
    EXPECT_EQ(drawn[0].equal(drawn[1]), keeps);
  }
}

TEST_F(ElasticRunTest, KeepsNoStepWhereAnOptimizerMayChangeUnseen) {
  SmallNet net;
  SGD plain = MomentumSgd(net.parameters());
  EXPECT_THAT(FailAfterAStep(State().model(net).optimizer(plain)), ElementsAre(0, 0));
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  EXPECT_THAT(FailAfterAStep(State().optimizer(optimizer)), ElementsAre(0, 0));
  EXPECT_THAT(FailAfterAStep(State().model(net)), ElementsAre(0, 0));
  EXPECT_THAT(FailAfterAStep(State().model(net).optimizer(optimizer)), ElementsAre(0, 1));
}

TEST_F(ElasticRunTest, GoesBackToTheCommitWhereNotTheOptimizerHasChangedAParameter) {
  SmallNet net;
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  const torch::Tensor before = net.hidden->weight.detach().clone();
  EXPECT_THAT(FailAfterAStep(State().model(net).optimizer(optimizer),
                             [&] { net.hidden->weight.detach().add_(1); }),
              ElementsAre(0, 0));
  EXPECT_TRUE(net.hidden->weight.equal(before));
}

TEST_F(ElasticRunTest, AStepKeepsParametersThatNoOptimizerHas) {
  SmallNet net;
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  torch::nn::Linear teacher(1, 1);
  for (auto& parameter : teacher->parameters()) parameter.requires_grad_(false).zero_();
  const auto teach = [&] { teacher->weight.add_(1); };
  teach();
  EXPECT_THAT(
      FailAfterAStep(State().model(net).model(teacher, "teacher").optimizer(optimizer), teach),
      ElementsAre(0, 1));
  EXPECT_EQ(teacher->weight.item<float>(), 1);
}

TEST_F(ElasticRunTest, LetsGoTheGradientsOfAStepThatWasNotMade) {
  constexpr int kSteps = 2;
  SmallNet net;
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  auto wrapped = DistributedDataParallel(std::make_shared<SmallNet>());
  SGD plain = MomentumSgd(wrapped.parameters());
  int step = 0;
  int calls = 0;
  State state = State()
                    .model(net)
                    .optimizer(optimizer)
                    .model(wrapped, "wrapped")
                    .optimizer(plain, "plain")
                    .value("step", step);
  elastic::run(state, [&] {
    ++calls;
    while (step < kSteps) {
      const Batch batch = BatchOfRank(step, rank());
      Loss(net, batch).backward();
      torch::mse_loss(wrapped.forward(batch.x), batch.y).backward();
      if (step == 1 && calls == 1) throw Error(ErrorCode::Backend, "on purpose");
      optimizer.step();
      optimizer.zero_grad();
      plain.step();
      plain.zero_grad();
      ++step;
      state.commit();
    }
  });
  EXPECT_EQ(calls, 2);
  ExpectTrainedAsAlone(net, kSteps);
  ExpectTrainedAsAlone(*wrapped.module(), kSteps);
}

TEST_F(ElasticRunTest, AScalerGoesOnInTheNextJob) {
  SmallNet net;
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  GradScaler scaler(GradScalerOptions().init_scale(8));
  int step = 0;
  State state =
      State().model(net).optimizer(optimizer).object("scaler", scaler).value("step", step);
  elastic::run(state, [&] {
    optimizer.zero_grad();
    scaler.scale(Loss(net, BatchOfRank(step, rank()))).backward();
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    if (++step < 3) throw HostsUpdated();
  });
  EXPECT_EQ(step, 3);
  ExpectTrainedAsAlone(net, step);
}

// What a scaler that is no part of the state has agreed on, it has with ranks that may have gone.
TEST_F(ElasticRunTest, ScalersAgreeInEachJob) {
  SmallNet net;
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  GradScaler scaler(GradScalerOptions().init_scale(8));
  int calls = 0;
  State state = State().model(net).optimizer(optimizer);
  elastic::run(state, [&] {
    scaler.scale(Loss(net, BatchOfRank(0, rank()))).backward();
    if (++calls == 1) {
      scaler.step(optimizer);
      scaler.update();
      if (rank() != 0) scaler = GradScaler(GradScalerOptions().init_scale(8));
      throw HostsUpdated();
    }
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { scaler.step(optimizer); }),
                HasSubstr("1 of them made"));
  });
  EXPECT_EQ(calls, 2);
}

TEST_F(ElasticRunTest, WithinAnotherOneIsRefused) {
  SmallNet net;
  State state = State().model(net);
  int calls = 0;
  elastic::run(state, [&] {
    if (++calls == 1) throw HostsUpdated();
    State inner = State().model(net);
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { elastic::run(inner, [] {}); }),
                HasSubstr("within another run()"));
  });
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(elastic::run(state, [] { return 3; }), 3);  // one after the other they may be
}

TEST_F(ElasticRunTest, MakesParametersAgainThatWereAdded) {
  SmallNet net;
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  std::vector<torch::Tensor> added;
  const auto add = [&] {
    added.push_back(torch::zeros({2}, torch::kDouble).requires_grad_());
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({added.back()}));
  };
  add();
  optimizer.zero_grad();
  add();
  int calls = 0;
  State state = State().model(net).optimizer(optimizer);
  elastic::run(state, [&] {
    ++calls;
    if (calls == 2) add();
    optimizer.zero_grad();
    auto loss = Loss(net, BatchOfRank(0, rank()));
    for (const auto& parameter : added) loss = loss + (rank() + 1.0) * parameter.sum();
    loss.backward();
    for (const auto& parameter : added) {
      EXPECT_EQ(parameter.grad()[0].item<double>(), (size() + 1) / 2.0);
    }
    optimizer.step();
    if (calls < 3) throw HostsUpdated();
  });
  EXPECT_EQ(calls, 3);
  check_parameters(net);
}

struct NetAround : torch::nn::Module {
  std::shared_ptr<DistributedDataParallel<SmallNet>> inner = register_module(
      "inner", std::make_shared<DistributedDataParallel<SmallNet>>(std::make_shared<SmallNet>()));
};

TEST_F(ElasticRunTest, MakesADataParallelModuleAgainThatIsInAnotherOne) {
  NetAround net;
  SGD plain = MomentumSgd(net.parameters());
  State state = State().model(net).optimizer(plain);
  int calls = 0;
  elastic::run(state, [&] {
    const Batch batch = BatchOfRank(calls, rank());
    plain.zero_grad();
    torch::mse_loss(net.inner->forward(batch.x), batch.y).backward();
    plain.step();
    if (++calls < 3) throw HostsUpdated();
  });
  ExpectTrainedAsAlone(*net.inner->module(), calls);
}

TEST_F(ElasticRunTest, AnOptimizerThatWasMovedFromIsNamed) {
  SmallNet net;
  auto optimizer = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  State state = State().model(net).optimizer(optimizer);
  const auto taken = std::move(optimizer);
  EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                      [&] { elastic::run(state, [] { throw HostsUpdated(); }); }),
              HasSubstr("it was moved from"));
}

// Two optimizers of the same parameters, and a module that averages: none leaves hooks behind.
TEST_F(ElasticRunTest, HooksOfJobsThatAreOverGo) {
  SmallNet net;
  auto first = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  auto second = DistributedOptimizer(MomentumSgd(net.parameters()), net.named_parameters());
  auto wrapped = DistributedDataParallel(std::make_shared<SmallNet>());
  SGD plain = MomentumSgd(wrapped.parameters());
  State state = State()
                    .model(net)
                    .model(wrapped, "wrapped")
                    .optimizer(first)
                    .optimizer(second, "second")
                    .optimizer(plain, "plain");
  const auto hooks = [](const std::vector<torch::Tensor>& parameters) {
    std::size_t most = 0;
    for (const auto& parameter : parameters) {
      most =
          std::max(most, torch::autograd::impl::grad_accumulator(parameter)->post_hooks().size());
    }
    return most;
  };
  const std::size_t before = hooks(net.parameters()) + hooks(wrapped.parameters());
  EXPECT_GT(before, 0U);
  int calls = 0;
  elastic::run(state, [&] {
    for (auto* optimizer : {&first, &second}) {
      optimizer->zero_grad();
      Loss(net, BatchOfRank(0, rank())).backward();
      optimizer->step();
    }
    const Batch batch = BatchOfRank(0, rank());
    plain.zero_grad();
    torch::mse_loss(wrapped.forward(batch.x), batch.y).backward();
    plain.step();
    check_parameters(net);
    check_parameters(wrapped);
    if (++calls < 4) throw HostsUpdated();
  });
  EXPECT_EQ(hooks(net.parameters()) + hooks(wrapped.parameters()), before);
}

}  // namespace
}  // namespace sirtaki::tests
