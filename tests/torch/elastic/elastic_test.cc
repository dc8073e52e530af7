#include "sirtaki/elastic.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "sirtaki/collectives.h"
#include "sirtaki/data_parallel.h"
#include "sirtaki/grad_scaler.h"
#include "sirtaki/observability.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/process_set.h"
#include "sirtaki/session.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using elastic::State;
using testing::AllOf;
using testing::HasSubstr;
using torch::optim::Adam;
using torch::optim::AdamOptions;

// A training with all kinds of parts. The nets of the ranks differ at first.
struct Training {
  Training() {
    const torch::NoGradGuard no_grad;
    double phase = 10.0 * rank();
    for (auto& parameter : net->parameters()) {
      parameter.copy_(0.5 * Waves(parameter.sizes(), phase += 1));
    }
  }

  torch::Tensor Loss(int step) {
    const Batch batch = BatchOfRank(step, rank());
    return torch::mse_loss(net->forward(batch.x), batch.y);
  }

  void Step(int step) {
    optimizer.zero_grad();
    Loss(step).backward();
    optimizer.step();
    scheduler.step();
    sampler.set_position(sampler.position() + 2);
    ++steps;
    loss += 0.25;
    is_warm = !is_warm;
    told += "x";
    best.add_(1);
    list.push_back(torch::full({2}, 1.0 * step));
  }

  State MakeState() {
    return State()
        .model(*net)
        .optimizer(optimizer)
        .scheduler(scheduler)
        .sampler(sampler)
        .value("steps", steps)
        .value("loss", loss)
        .value("is_warm", is_warm)
        .value("told", told)
        .value("best", best)
        .value("list", list);
  }

  // All that there is, to the bit.
  std::string Bytes() {
    std::vector<torch::Tensor> tensors = net->parameters();
    for (const auto& buffer : net->buffers()) tensors.push_back(buffer);
    for (const auto& parameter : net->parameters()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto& of_adam = static_cast<const torch::optim::AdamParamState&>(*found->second);
      tensors.insert(tensors.end(),
                     {torch::tensor(of_adam.step()), of_adam.exp_avg(), of_adam.exp_avg_sq()});
    }
    tensors.push_back(best);
    tensors.insert(tensors.end(), list.begin(), list.end());
    std::ostringstream bytes;
    for (const auto& tensor : tensors) {
      bytes << tensor.sizes();
      bytes.write(static_cast<const char*>(tensor.const_data_ptr()),
                  static_cast<std::streamsize>(tensor.nbytes()));
    }
    bytes << " " << optimizer.param_groups()[0].options().get_lr() << " " << sampler.epoch() << " "
          << sampler.position() << " " << steps << " " << loss << " " << is_warm << " " << told;
    return bytes.str();
  }

  torch::nn::Sequential net = MakeNet();
  DistributedOptimizer<Adam> optimizer{Adam(net->parameters(), AdamOptions(0.01)),
                                       net->named_parameters()};
  torch::optim::StepLR scheduler{optimizer, 2, 0.5};
  DistributedSampler sampler{100};
  std::int64_t steps = 0;
  double loss = 0.5 + rank();
  bool is_warm = rank() == 0;
  std::string told = std::string(static_cast<std::size_t>(rank() + 1), 'r');
  torch::Tensor best = torch::full({2, 2}, rank() + 1.0);
  std::vector<torch::Tensor> list = {torch::ones({rank() + 1})};

 private:
  static torch::nn::Sequential MakeNet() {
    torch::nn::Sequential made(torch::nn::Linear(5, 7), torch::nn::BatchNorm1d(7),
                               torch::nn::Linear(7, 3));
    made->to(torch::kDouble);
    return made;
  }
};

TEST(ElasticStateTest, RestoreBringsBackWhatWasCommittedToTheBit) {
  RunTorchRanks(2, [](int) {
    Training training;
    State state = training.MakeState();
    state.sync();
    training.Step(0);
    training.Step(1);
    state.commit();
    EXPECT_EQ(state.commits(), 1);
    const std::string committed = training.Bytes();
    const auto lr = [&] { return training.optimizer.param_groups()[0].options().get_lr(); };
    for (int attempt = 0; attempt < 2; ++attempt) {  // a copy is not used up
      EXPECT_EQ(lr(), 0.01);
      training.Step(2 + attempt);
      EXPECT_EQ(lr(), 0.005);  // it was the scheduler's third step each time
      EXPECT_NE(training.Bytes(), committed);
      state.restore();
      EXPECT_EQ(training.Bytes(), committed);
    }
  });
}

TEST(ElasticStateTest, SyncGivesAllRanksWhatRank0Has) {
  std::vector<std::string> bytes(3);
  RunTorchRanks(3, [&](int rank) {
    Training training;
    State state = training.MakeState();
    training.Step(0);
    if (rank == 0) {
      training.sampler.set_epoch(4);
      training.sampler.set_position(6);
      training.steps = 9;
    }
    state.sync();
    bytes[static_cast<std::size_t>(rank)] = training.Bytes();
    EXPECT_EQ(training.told, "rx");
    EXPECT_EQ(training.steps, 9);
    EXPECT_EQ(training.list.size(), 2U);
    EXPECT_EQ(training.sampler.epoch(), 4U);
    training.steps = 1;
    state.restore();  // to what came from rank 0
    EXPECT_EQ(training.steps, 9);
  });
  EXPECT_EQ(bytes[1], bytes[0]);
  EXPECT_EQ(bytes[2], bytes[0]);
}

// Ranks that are there wait at each call for those that come.
TEST(ElasticStateTest, SyncMakesNoMoreCallsForMoreParts) {
  RunTorchRanks(2, [](int) {
    Training training;
    training.Step(0);
    const auto calls_of = [](State state) {
      const std::int64_t before = metrics().calls;
      state.sync();
      return metrics().calls - before;
    };
    State of_two = State().model(*training.net).value("steps", training.steps);
    const std::int64_t few = calls_of(of_two);
    EXPECT_GT(few, 0);
    EXPECT_EQ(calls_of(training.MakeState()), few);
  });
}

TEST(ElasticStateTest, AfterAFaultNothingIsCommitted) {
  RunTorchRanks(1, [](int) {
    int epoch = 1;
    torch::nn::Linear layer(2, 2);
    State state = State().model(layer).value("epoch", epoch);
    state.commit();
    const auto weight = layer->weight.detach().clone();
    epoch = 2;
    layer->weight.detach().fill_(7);
    abort("on purpose");
    ErrorOf(ErrorCode::Aborted, [&] { state.commit(); });
    EXPECT_EQ(state.commits(), 1);
    state.restore();
    EXPECT_EQ(epoch, 1);
    EXPECT_TRUE(layer->weight.equal(weight));
  });
}

TEST(ElasticStateTest, ATensorMayBeMissingOrGetAnotherShape) {
  RunTorchRanks(2, [](int rank) {
    torch::Tensor value = rank == 0 ? torch::Tensor() : torch::ones({3});
    State state = State().value("tensor", value);
    state.sync();
    EXPECT_FALSE(value.defined());
    value = torch::full({rank + 1}, 1.0 * rank).requires_grad_();
    state.sync();
    EXPECT_TRUE(value.equal(torch::zeros({1})) && value.requires_grad());
    state.restore();
    const torch::Tensor before = value;
    torch::NoGradGuard no_grad;
    value.add_(1);
    state.restore();
    EXPECT_TRUE(value.equal(torch::zeros({1})) && !value.is_same(before));
  });
}

// This rank's value takes what rank 0's saves.
template <class T>
void TakeFromRank0(T& value) {
  const detail::ElasticPart part = detail::ElasticSavedPart("value", value);
  detail::BroadcastSaved(part.save, part.load, 0, "value", {});
}

// The device of rank 0 may be none of another rank's; here that has a device without elements.
TEST(ElasticStateTest, TensorsInAValueComeToTheDeviceOfTheOnesThatWereThere) {
  RunTorchRanks(2, [](int rank) {
    const c10::Device own(rank == 0 ? torch::kCPU : torch::kMeta);
    const auto ones = [](std::int64_t length) { return torch::ones({length}); };
    std::vector<torch::Tensor> list = {ones(2 + rank).to(own), ones(1)};
    if (rank == 0) list.push_back(ones(4));
    TakeFromRank0(list);
    ASSERT_EQ(list.size(), 3U);
    EXPECT_EQ(list[0].device(), own);
    EXPECT_EQ(list[0].size(0), 2);
    EXPECT_EQ(list[1].device(), c10::Device(torch::kCPU));
    EXPECT_EQ(list[2].size(0), 4);
    c10::IValue value = c10::ivalue::Tuple::create(
        {c10::IValue(7 + rank), c10::IValue(std::vector<torch::Tensor>{ones(3).to(own)})});
    TakeFromRank0(value);
    const auto& elements = value.toTupleRef().elements();
    EXPECT_EQ(elements[0].toInt(), 7);
    EXPECT_EQ(elements[1].toTensorVector()[0].device(), own);
    std::vector<torch::Tensor> empty;
    if (rank == 0) empty.push_back(ones(2));
    TakeFromRank0(empty);
    EXPECT_TRUE(empty.at(0).equal(ones(2)));
  });
}

TEST(ElasticStateTest, ABufferMayBeMissing) {
  RunTorchRanks(1, [](int) {
    torch::nn::Linear layer(torch::nn::LinearOptions(2, 2).bias(false));
    layer->register_buffer("later", torch::Tensor());
    State state = State().model(layer);
    state.sync();
    const torch::Tensor weight = layer->weight.detach().clone();
    layer->weight.detach().zero_();
    state.restore();
    EXPECT_TRUE(layer->weight.equal(weight));
  });
}

TEST(ElasticStateTest, OtherNamesOrTypesAreAnErrorOnAllRanks) {
  RunTorchRanks(2, [](int rank) {
    std::int64_t epoch = 0;
    State state = State().value(rank == 0 ? "epoch" : "epochs", epoch);
    EXPECT_THAT(
        ErrorOf(ErrorCode::Mismatch, [&] { elastic::run(state, [] {}); }),
        AllOf(HasSubstr("elastic::State"), HasSubstr("\"epoch\""), HasSubstr("\"epochs\"")));
    int whole = 0;
    double real = 0;
    State typed = rank == 0 ? State().value("loss", whole) : State().value("loss", real);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { typed.sync(); }),
                AllOf(HasSubstr("int"), HasSubstr("double")));
    State fewer = State().value("epoch", epoch);
    if (rank == 0) fewer.value("loss", real);
    ErrorOf(ErrorCode::Mismatch, [&] { fewer.sync(); });
    EXPECT_EQ(allreduce(torch::ones({1}), AllreduceOptions().op(ReduceOp::Sum)).item<float>(), 2);
  });
}

TEST(ElasticStateTest, AnObjectThatCannotBeLoadedIsAnErrorOnAllRanks) {
  RunTorchRanks(2, [](int rank) {
    DistributedSampler sampler(rank == 0 ? 10 : 11);
    State state = State().sampler(sampler);
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { state.sync(); }),
                HasSubstr("10 samples, this one has 11"));
  });
}

TEST(ElasticStateTest, SyncLeavesAScalerAlikeOnAllRanks) {
  const auto train = [](int rank) {
    SmallNet net;
    auto optimizer =
        DistributedOptimizer(Adam(net.parameters(), AdamOptions(0.01)), net.named_parameters());
    GradScaler scaler(GradScalerOptions().init_scale(8));
    State state = State().object("scaler", scaler);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      scaler.scale(Loss(net, BatchOfRank(step, rank))).backward();
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update();
      state.sync();
    }
  };
  RunTorchRanks(1, train);  // a rank that all others have left
  RunTorchRanks(2, train);
}

TEST(ElasticStateTest, AStepThatKeepsNothingSaysWhyOnce) {
  RunTorchRanks(1, [](int) {
    auto wrapped = DistributedDataParallel(std::make_shared<SmallNet>());
    Adam plain(wrapped.parameters(), AdamOptions(0.01));
    State state = State().model(wrapped).optimizer(plain, "adam");
    const auto said = [&state] {
      testing::internal::CaptureStderr();
      state.step();
      return testing::internal::GetCapturedStderr();
    };
    EXPECT_THAT(said(), HasSubstr("the optimizer \"adam\" is no DistributedOptimizer"));
    EXPECT_EQ(said(), "");
    torch::nn::Linear layer(2, 2);
    state = State().model(layer);
    EXPECT_THAT(said(), HasSubstr("the model \"model\" trains \"weight\", which no optimizer"));
    auto optimizer = DistributedOptimizer(Adam(layer->parameters(), AdamOptions(0.01)),
                                          layer->named_parameters());
    state = State().optimizer(optimizer);
    EXPECT_THAT(said(), HasSubstr("has a parameter that no model of the state has"));
    state.model(layer);
    EXPECT_EQ(said(), "");
  });
}

TEST(ElasticStateTest, MistakesAreNamed) {
  RunTorchRanks(2, [](int rank) {
    int epoch = 0;
    State state = State().value("epoch", epoch);
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { state.value("epoch", epoch); }),
                HasSubstr("the value \"epoch\" is there already"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { state.restore(); }),
                HasSubstr("before commit()"));
    SmallNet net;
    const auto make = [&net](const DistributedOptimizerOptions& options) {
      return DistributedOptimizer(Adam(net.parameters(), AdamOptions(0.01)), net.named_parameters(),
                                  options);
    };
    {
      auto optimizer = make(DistributedOptimizerOptions().shard(Shard::OptimizerState));
      EXPECT_THAT(ErrorOf(ErrorCode::Unsupported, [&] { state.optimizer(optimizer, "adam"); }),
                  AllOf(HasSubstr("optimizer \"adam\" is sharded"), HasSubstr("Shard::None")));
    }
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { state.copy_shards(-2); }),
                HasSubstr("copy_shards(-2)"));
    const ProcessSet alone = add_process_set({0});
    if (rank == 0) {
      auto optimizer = make(DistributedOptimizerOptions().process_set(alone));
      EXPECT_THAT(ErrorOf(ErrorCode::Unsupported, [&] { state.optimizer(optimizer); }),
                  HasSubstr("over a process set"));
    }
    state.commit();
    torch::nn::Linear layer(2, 2);
    State of_model = State().model(layer);
    of_model.commit();
    layer->register_buffer("new", torch::ones({1}));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { of_model.restore(); }),
                HasSubstr("model \"model\" has got or lost"));
  });
}

TEST(ElasticRunTest, GivesAllRanksTheStateAndReturnsTheResult) {
  RunTorchRanks(2, [](int rank) {
    int epoch = rank + 5;
    int changes = 0;
    State state = State().value("epoch", epoch).on_change([&] { ++changes; });
    EXPECT_EQ(elastic::run(state, [&] { return epoch + 1; }), 6);
    elastic::run(state, [&] { ++epoch; });
    EXPECT_EQ(epoch, 6);
    EXPECT_EQ(changes, 0);
    EXPECT_FALSE(elastic::is_elastic());
    EXPECT_EQ(elastic::generation(), 0);
  });
}

TEST(ElasticRunTest, WarnsOfAnOptimizerWhoseModelTheStateDoesNotHave) {
  RunTorchRanks(1, [](int) {
    torch::nn::Linear layer(2, 2);
    auto optimizer = DistributedOptimizer(Adam(layer->parameters(), AdamOptions(0.01)),
                                          layer->named_parameters());
    State state = State().optimizer(optimizer);
    const auto said = [&state] {
      testing::internal::CaptureStderr();
      sirtaki::elastic::run(state, [] {});
      return testing::internal::GetCapturedStderr();
    };
    EXPECT_THAT(said(), HasSubstr("the optimizer \"optimizer\" has a parameter that no model"));
    state.model(layer);
    EXPECT_EQ(said(), "");
  });
}

TEST(ElasticRunTest, LeavesOtherErrorsAlone) {
  RunTorchRanks(2, [](int) {
    int calls = 0;
    State state = State().value("calls", calls);
    EXPECT_THROW(elastic::run(state,
                              [&] {
                                ++calls;
                                throw std::out_of_range("mine");
                              }),
                 std::out_of_range);
    for (const auto code :
         {ErrorCode::Mismatch, ErrorCode::InvalidArgument, ErrorCode::NotInitialized,
          ErrorCode::DuplicateName, ErrorCode::Unsupported}) {
      ErrorOf(code, [&] {
        elastic::run(state, [&] {
          ++calls;
          throw Error(code, "mine");
        });
      });
    }
    // A rank that has ended does not come back.
    ErrorOf(ErrorCode::Aborted, [&] {
      elastic::run(state, [&] {
        ++calls;
        throw Error(ErrorCode::Aborted, "aborted: the program exited with code 3");
      });
    });
    EXPECT_EQ(calls, 7);
  });
}

// A sampler in a job of other ranks: each of its samples that was not given yet is given once.
TEST(ElasticSamplerTest, SharesOutWhatIsLeftAmongTheRanksThatThereAre) {
  constexpr std::size_t kSamples = 30;
  std::vector<std::optional<DistributedSampler>> kept(3);
  std::vector<std::size_t> given;
  std::mutex mutex;
  const auto take = [&](DistributedSampler& sampler, std::size_t count) {
    const auto indices = sampler.next(count);
    const std::lock_guard<std::mutex> lock(mutex);
    given.insert(given.end(), indices->begin(), indices->end());
  };
  RunTorchRanks(3, [&](int rank) {
    auto& sampler = kept[static_cast<std::size_t>(rank)].emplace(kSamples);
    sampler.set_epoch(2);
    take(sampler, 4);
  });
  RunTorchRanks(2, [&](int rank) {
    auto& sampler = *kept[static_cast<std::size_t>(2 - rank)];  // another rank than before
    sampler.take_ranks_of_job();
    EXPECT_EQ(sampler.epoch(), 2U);
    EXPECT_EQ(sampler.position(), 0U);
    EXPECT_EQ(sampler.size(), 9U);
    take(sampler, 5);
    sampler.take_ranks_of_job();  // nothing has changed
    EXPECT_EQ(sampler.position(), 5U);
    sampler.reset();  // as a loader does: it does not begin another epoch
    EXPECT_EQ(sampler.epoch(), 2U);
    take(sampler, 100);
  });
  std::sort(given.begin(), given.end());
  std::vector<std::size_t> all(kSamples);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(given, all);
  RunTorchRanks(2, [](int) {
    DistributedSampler own(10, DistributedSamplerOptions().rank(3).ranks(5));
    own.take_ranks_of_job();  // the program has said which
    EXPECT_EQ(own.size(), 2U);
  });
}

}  // namespace
}  // namespace sirtaki::tests
