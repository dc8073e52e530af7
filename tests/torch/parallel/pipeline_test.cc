#include "sirtaki/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "session/session_observability.h"
#include "sirtaki/collectives.h"
#include "sirtaki/mesh.h"
#include "sirtaki/observability.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/session.h"
#include "tests/support/pipeline_simulation.h"
#include "tests/support/test_scale.h"
#include "tests/torch/parallel/pipeline_training.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using pipelines::Model;
using pipelines::Whole;
using testing::AllOf;
using testing::HasSubstr;

core::Config Exact() {
  core::Config config;
  config.deterministic = true;
  return config;
}

// Trains some batches and compares losses, gradients and parameters with those of one process, to the
// bit.
void ExpectEqualTraining(const Model& model, int ranks, const PipelineOptions& options) {
  constexpr int kBatches = 3;
  const Whole whole(model);
  torch::optim::SGD sgd(whole.parameters(), 0.1);
  std::vector<double> losses;
  std::vector<std::map<std::string, torch::Tensor>> gradients;
  std::vector<std::string> names;
  for (int stage = 0; stage < model.stages; ++stage) {
    for (const char* of : {".linear.weight", ".linear.bias"}) {
      names.push_back(std::to_string(stage) + of);
    }
  }
  // Threads that make stages at the same time draw from one generator.
  std::map<std::string, torch::Tensor> start;
  for (const std::string& name : names) start[name] = whole.Parameter(name).detach().clone();
  for (int step = 0; step < kBatches; ++step) {
    sgd.zero_grad();
    losses.push_back(whole.Train(model.Input(step), model.Target(step)));
    gradients.emplace_back();
    for (const std::string& name : names) {
      gradients.back()[name] = whole.Parameter(name).grad().clone();
    }
    sgd.step();
  }
  const double evaluated = whole.Evaluate(model.Input(9), model.Target(9));
  // Random numbers are the process's, and ranks are threads here.
  std::vector<torch::Tensor> inputs;
  std::vector<torch::Tensor> targets;
  for (const int step : {0, 1, 2, 9}) {
    inputs.push_back(model.Input(step));
    targets.push_back(model.Target(step));
  }
  RunTorchRanks(
      ranks,
      [&](int) {
        Pipeline pipeline(model.Factories(), pipelines::Loss, options);
        torch::NoGradGuard no_grad;
        for (auto& parameter : pipeline.named_parameters()) {
          parameter.value().copy_(start.at(parameter.key()));
        }
        torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
        const auto given = [&](const std::vector<torch::Tensor>& of, bool here, std::size_t i) {
          return here ? of[i] : torch::Tensor();
        };
        for (std::size_t step = 0; step < kBatches; ++step) {
          optimizer.zero_grad();
          const double loss = pipeline.train_batch(given(inputs, pipeline.is_first(), step),
                                                   given(targets, pipeline.is_last(), step));
          EXPECT_EQ(loss, losses[step]) << step;
          for (const auto& parameter : pipeline.named_parameters()) {
            EXPECT_TRUE(torch::equal(parameter.value().grad(), gradients[step].at(parameter.key())))
                << parameter.key() << " in batch " << step << "\n"
                << pipeline.report().schedule;
          }
          EXPECT_EQ(pipeline.report().most_kept, pipeline.report().peak_activations);
          optimizer.step();
        }
        EXPECT_EQ(pipeline.evaluate_batch(given(inputs, pipeline.is_first(), 3),
                                          given(targets, pipeline.is_last(), 3)),
                  evaluated);
      },
      Exact());
}

TEST(PipelineTest, EachScheduleGivesTheGradientsOfOneProcess) {
  for (const int ranks : {1, 2, 4}) {
    for (const char* schedule : {"gpipe", "1f1b", "interleaved_1f1b"}) {
      SCOPED_TRACE(std::string(schedule) + " on " + std::to_string(ranks));
      Model model;
      model.stages = ranks * (std::string(schedule) == "1f1b" ? 1 : 2);
      ExpectEqualTraining(model, ranks, model.Options().schedule(schedule));
    }
  }
}

TEST(PipelineTest, SkipsAndTiesGiveTheGradientsOfOneProcess) {
  Model model;
  model.stages = 4;
  model.skips = {{"far", 0, 3}, {"far", 0, 2}, {"mask", 1, 3}};
  model.ties = {{"0.linear.weight", "3.linear.weight"}};
  ExpectEqualTraining(model, 4, model.Options());
  ExpectEqualTraining(model, 2, model.Options().schedule("interleaved_1f1b"));
  ExpectEqualTraining(model, 2, model.Options().schedule("gpipe").placing({0, 1, 1, 0}));
  ExpectEqualTraining(model, 1, model.Options().schedule("gpipe"));
}

TEST(PipelineTest, AScheduleOfOnesOwnRuns) {
  Model model;
  model.micro_batches = 3;  // so that the order of backward passes is seen in the last bits
  ExpectEqualTraining(model, 2,
                      model.Options().schedule("rank 0: F0.1 F0.2 F0.0 B0.0 B0.1 B0.2\n"
                                               "rank 1: F1.1 F1.2 F1.0 B1.0 B1.1 B1.2\n"));
}

// ---- what is refused ----

TEST(PipelineTest, OtherOptionsOnOneRankAreToldOnAll) {
  const Model model;
  const auto told = [&](const PipelineOptions& on_rank_1, const std::string& words) {
    RunTorchRanks(2, [&](int rank) {
      const PipelineOptions options = rank == 0 ? model.Options() : on_rank_1;
      EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                          [&] { Pipeline(model.Factories(), pipelines::Loss, options); }),
                  AllOf(HasSubstr("the pipeline \"pipeline\""), HasSubstr(words)));
      allreduce(torch::ones({1}));  // the job goes on
    });
  };
  told(model.Options().micro_batches(2), "4 micro-batches on rank 0; 2 micro-batches on rank 1");
  told(model.Options().schedule("gpipe"), "schedule \"gpipe\" on rank 1");
  told(model.Options().recompute({1}), "recomputed stages 1 on rank 1");
  told(model.Options().skips({{"far", 0, 1}}),
       "no skip connections on rank 0; skip connections \"far\" from stage 0 to stage 1 on rank 1");
  told(model.Options().ties({{"0.linear.bias", "1.linear.bias"}}), "0.linear.bias");
}

TEST(PipelineTest, AWrongScheduleIsRefusedWithItsInstruction) {
  const Model model;
  const auto refused = [&](const PipelineOptions& options, const std::string& words) {
    RunTorchRanks(2, [&](int) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                          [&] { Pipeline(model.Factories(), pipelines::Loss, options); }),
                  HasSubstr(words));
    });
  };
  refused(model.Options().micro_batches(1).schedule("rank 0: B0.0 F0.0\nrank 1: F1.0 B1.0"),
          "rank 0, instruction");
  refused(model.Options().schedule("gpip"), "allowed is gpipe, 1f1b, interleaved_1f1b");
  refused(model.Options().micro_batches(0), "at least one");
  refused(model.Options().micro_batches(20000), "use fewer micro-batches");
  refused(model.Options().placing({0, 0}), "rank 1 has none of the 2 stages");
  refused(model.Options().ties({{"0.linear.weight", "1.linear.wight"}}),
          "there is no parameter \"1.linear.wight\" in stage 1");
  refused(model.Options().ties({{"0.linear.weight", "1.linear.bias"}}), "one type and shape");
  refused(model.Options().skips({{"back", 1, 0}}), "has to lead to a later one");
}

TEST(PipelineTest, WhatAFactoryThrowsIsToldOnAllRanks) {
  const Model model;
  RunTorchRanks(2, [&](int) {
    std::vector<PipelineFactory> factories = model.Factories();
    factories[1] = []() -> PipelineStage { throw std::runtime_error("no memory"); };
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] { Pipeline(factories, pipelines::Loss, model.Options()); }),
                HasSubstr("no memory (on rank 1)"));
  });
}

TEST(PipelineTest, LbfgsIsRefusedByName) {
  const Model model;
  RunTorchRanks(2, [&](int) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options());
    torch::optim::LBFGS optimizer(pipeline.parameters());
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument, [&] { pipeline.clip_grad_norm_(optimizer, 1); }),
        HasSubstr("LBFGS cannot train a pipeline"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { pipeline.optimizer_options(); }),
                HasSubstr("mesh"));
  });
}

// ---- what goes wrong in a batch ----

// Runs a batch on each rank, which has to end with an error that has these words.
void ExpectErrors(const Model& model, const PipelineOptions& options, int stages_that_run,
                  const std::function<PipelineStage::Function(int stage)>& forward_of,
                  const std::function<void(Pipeline&)>& batch,
                  const std::vector<std::pair<ErrorCode, std::string>>& words) {
  std::barrier all_have_pipelines(static_cast<std::ptrdiff_t>(words.size()));
  RunTorchRanks(static_cast<int>(words.size()), [&](int rank) {
    std::vector<PipelineFactory> factories;
    for (int stage = 0; stage < stages_that_run; ++stage) {
      factories.emplace_back([&, stage] {
        const auto module = model.Make(stage);
        const PipelineStage::Function before = forward_of(stage);
        return PipelineStage(
            [module, before](const std::vector<torch::Tensor>& inputs) {
              return module->forward(before ? before(inputs) : inputs);
            },
            module);
      });
    }
    Pipeline pipeline(factories, pipelines::Loss, options);
    // An error of the batch is not to come while another rank still makes its pipeline.
    all_have_pipelines.arrive_and_wait();
    const auto& [code, text] = words[static_cast<std::size_t>(rank)];
    EXPECT_THAT(ErrorOf(code, [&] { batch(pipeline); }), HasSubstr(text)) << "rank " << rank;
  });
}

TEST(PipelineTest, AnotherShapeIsAnErrorThatNamesBoth) {
  const Model model;
  const torch::Tensor small = torch::ones({8, model.width});
  const torch::Tensor large = torch::ones({12, model.width});
  const std::string text =
      "stage 0 on rank 0 hands other tensors to stage 1 than in its first micro-batch: tensor 0 "
      "was "
      "float32 [2, 5] with a gradient and is float32 [3, 5] with a gradient";
  ExpectErrors(
      model, model.Options(), 2, [](int) { return nullptr; },
      [&](Pipeline& pipeline) {
        pipeline.train_batch(small, small);
        pipeline.evaluate_batch(large, large);  // whose batches may differ
        pipeline.train_batch(large, large);
      },
      {{ErrorCode::InvalidArgument, text}, {ErrorCode::Aborted, text}});
}

TEST(PipelineTest, ABatchThatCannotBeCutIsAnError) {
  const Model model;
  const torch::Tensor batch = torch::ones({6, model.width});
  const std::string text =
      "the inputs of stage 0 on rank 0 have 6 samples, which cannot be cut into 4 micro-batches";
  ExpectErrors(
      model, model.Options(), 2, [](int) { return nullptr; },
      [&](Pipeline& pipeline) {
        pipeline.train_batch(batch, pipeline.is_last() ? torch::ones({8, 5}) : torch::Tensor());
      },
      {{ErrorCode::InvalidArgument, text}, {ErrorCode::Aborted, text}});
}

TEST(PipelineTest, AStageThatThrowsIsNamedOnTheOtherRanks) {
  const Model model;
  const auto throws = [](int stage) -> PipelineStage::Function {
    if (stage != 1) return nullptr;
    const auto calls = std::make_shared<int>(0);
    return [calls](const std::vector<torch::Tensor>& inputs) {
      if (++*calls == 3) throw Error(ErrorCode::Unsupported, "the third is too much");
      return inputs;
    };
  };
  ExpectErrors(model, model.Options(), 2, throws,
               [&](Pipeline& pipeline) { pipeline.train_batch(model.Input(), model.Target()); },
               {{ErrorCode::Aborted,
                 "\"F1.2\" (the forward pass of stage 1 for micro-batch 2): the third is too much"},
                {ErrorCode::Unsupported, "the third is too much"}});
}

// A rank that does not go on: the others say where they wait, and for what.
class LateRank {
 public:
  void Wait() const {
    ASSERT_EQ(over_.wait_for(std::chrono::minutes(2)), std::future_status::ready);
  }
  void End() const { end_.set_value(); }

 private:
  mutable std::promise<void> end_;
  const std::shared_future<void> over_ = end_.get_future().share();
};

// `at`: the call of the stage's forward pass, counted from 1, in which it is late; or whose backward
// pass is.
void ExpectLate(const Model& model, const PipelineOptions& given, int stage, int at, bool backward,
                bool training, const std::string& text) {
  LateRank late;
  const auto forward_of = [&](int of) -> PipelineStage::Function {
    if (of != stage) return nullptr;
    const auto calls = std::make_shared<int>(0);
    return [&late, calls, at, backward](const std::vector<torch::Tensor>& inputs) {
      if (++*calls != at) return inputs;
      if (!backward) {
        late.Wait();
        return inputs;
      }
      std::vector<torch::Tensor> hooked = inputs;
      if (!hooked[0].requires_grad()) hooked[0] = hooked[0].clone().requires_grad_(true);
      hooked[0].register_hook([&late](const torch::Tensor&) { late.Wait(); });
      return hooked;
    };
  };
  const int late_rank = stage;  // stage s is on rank s
  std::vector<std::pair<ErrorCode, std::string>> words(2, {ErrorCode::Aborted, text});
  words[static_cast<std::size_t>(1 - late_rank)] = {ErrorCode::TimedOut, text};
  const PipelineOptions options = PipelineOptions(given).timeout(std::chrono::milliseconds(500));
  ExpectErrors(
      model, options, 2, forward_of,
      [&](Pipeline& pipeline) {
        try {
          if (training) {
            pipeline.train_batch(model.Input(), model.Target());
          } else {
            pipeline.evaluate_batch(model.Input(), model.Target());
          }
        } catch (...) {
          if (pipeline.stages().front() != late_rank) late.End();
          throw;
        }
      },
      words);
}

TEST(PipelineTest, ALateRankIsNamedInEachInstruction) {
  Model model;
  const PipelineOptions options = model.Options();
  ExpectLate(
      model, options, 0, 2, false, true,
      "stage 1 on rank 1 waits for activations of micro-batch 1 from stage 0 on rank 0, for ");
  ExpectLate(model, options, 1, 3, true, true,
             "stage 0 on rank 0 waits for gradients of micro-batch 2 from stage 1 on rank 1, for ");
  ExpectLate(model, options, 1, 4, false, false,
             "stage 0 on rank 0 waits for the loss from stage 1 on rank 1, for ");
  model.skips = {{"mask", 0, 1}};
  ExpectLate(model, model.Options(), 0, 1, false, true,
             "stage 1 on rank 1 waits for activations of micro-batch 0 from stage 0 on rank 0");
  model.skips.clear();
  model.ties = {{"0.linear.weight", "1.linear.weight"}};
  ExpectLate(model, model.Options(), 0, 4, true, true,
             "stage 1 on rank 1 waits for the gradient of the tied parameter \"0.linear.weight\" "
             "from stage 0 on rank 0, for ");
}

TEST(PipelineTest, RecordsSayWhatAMessageCarries) {
  const Model model;
  std::vector<std::string> running;
  LateRank late;
  std::vector<PipelineFactory> factories = model.Factories();
  factories[0] = [&] {
    return PipelineStage(
        [&](const std::vector<torch::Tensor>& inputs) {
          late.Wait();
          return inputs;
        },
        nullptr);
  };
  RunTorchRanks(2, [&](int rank) {
    Pipeline pipeline(factories, pipelines::Loss,
                      model.Options().timeout(std::chrono::milliseconds(500)));
    try {
      pipeline.evaluate_batch(model.Input(), model.Target());
    } catch (const Error&) {
      if (rank == 0) return;
      for (const auto& operation :
           detail::CurrentSession()->session().Describe("", std::chrono::seconds(10)).running) {
        running.push_back(operation.what);
      }
      late.End();
    }
  });
  EXPECT_THAT(running, testing::Contains(
                           HasSubstr(" (activations of micro-batch 0 from stage 0 to stage 1)")));
}

// ---- what is seen of it ----

TEST(PipelineTest, ATimelineHasEachPassOfARankInItsBatch) {
  Model model;
  model.ties = {{"0.linear.weight", "1.linear.weight"}};
  std::vector<std::vector<std::string>> told(2);
  RunTorchRanks(2, [&](int rank) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options().name("p"));
    core::trace::Observer& observer = *detail::CurrentSession()->session().observation().observer();
    observer.detail = true;
    pipeline.train_batch(model.Input(), model.Target());
    pipeline.evaluate_batch(model.Input(), model.Target());
    std::vector<core::trace::Event> events;
    std::uint64_t lost = 0;
    observer.recorder.Read(0, true, &events, &lost);
    for (const core::trace::Event& event : events) {
      // Whether a rank has to wait is a matter of luck.
      if (event.track != core::trace::Track::kPipeline ||
          event.kind == core::trace::EventKind::kBubble) {
        continue;
      }
      told[static_cast<std::size_t>(rank)].push_back(std::to_string(event.number) + " " +
                                                     std::string(event.text()));
    }
  });
  EXPECT_THAT(told[0], testing::ElementsAre("1 F0.0", "1 F0.1", "1 B0.0", "1 F0.2", "1 B0.1",
                                            "1 F0.3", "1 B0.2", "1 B0.3", "1 T:0.linear.weight",
                                            "1 p", "2 F0.0", "2 F0.1", "2 F0.2", "2 F0.3", "2 p"));
  EXPECT_THAT(told[1], testing::ElementsAre("1 F1.0", "1 B1.0", "1 F1.1", "1 B1.1", "1 F1.2",
                                            "1 B1.2", "1 F1.3", "1 B1.3", "1 T:0.linear.weight",
                                            "1 p", "2 F1.0", "2 F1.1", "2 F1.2", "2 F1.3", "2 p"));
}

TEST(PipelineTest, TheTableAtTheEndHasBubblesBesideThoseOfTheSchedule) {
  const Model model;
  std::vector<double> waited(2);
  core::Config config;
  config.summary = true;
  testing::internal::CaptureStderr();
  RunTorchRanks(
      2,
      [&](int rank) {
        Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options());
        for (int i = 0; i < 3; ++i) pipeline.train_batch(model.Input(), model.Target());
        waited[static_cast<std::size_t>(rank)] = pipeline.report().waited;
      },
      config);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("\nThe pipeline \"pipeline\", 2 batches: its ranks wait "));
  EXPECT_THAT(text,
              HasSubstr(" of the time, and 20.0 % by its schedule with passes of equal times"));
  for (const double share : waited) EXPECT_TRUE(share > 0 && share < 1) << share;
}

// Rank 2 waits in a collective for the two ranks of the pipeline, of which one waits for the other.
TEST(PipelineTest, TheStallReportNamesStageAndMicroBatchAndWhatLacks) {
  const Model model;
  const std::string what =
      "stage 1 on rank 1 waits for activations of micro-batch 1 from stage 0 on rank 0, for ";
  const LateRank late;
  std::mutex mutex;
  std::vector<std::string> reports;
  bool warned = false;
  core::SetLogSink([&](core::LogLevel, const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (line.find("the pipeline \"p\": " + what) == std::string::npos) return;
    const bool was_there = warned && !reports.empty();
    if (line.find("not submitted by") != std::string::npos) {
      reports.push_back(line);
    } else {
      warned = true;
    }
    if (!was_there && warned && !reports.empty()) late.End();
  });
  core::Config config;
  config.stall_warning = std::chrono::milliseconds(50);
  std::int64_t stalls = 0;
  RunTorchRanks(
      3,
      [&](int rank) {
        const ProcessSet two = add_process_set({0, 1});
        if (rank < 2) {
          std::vector<PipelineFactory> factories = model.Factories();
          const auto calls = std::make_shared<int>(0);
          factories[0] = [&late, calls] {
            return PipelineStage(
                [&late, calls](const std::vector<torch::Tensor>& inputs) {
                  if (++*calls == 2) late.Wait();
                  return inputs;
                },
                nullptr);
          };
          Pipeline pipeline(factories, pipelines::Loss, model.Options().process_set(two).name("p"));
          pipeline.evaluate_batch(model.Input(), model.Target());
        }
        allreduce(torch::ones({1}), AllreduceOptions().name("after it"));
        if (rank == 1) stalls = metrics().stall_warnings;
      },
      config);
  core::SetLogSink(nullptr);
  ASSERT_FALSE(reports.empty());
  EXPECT_THAT(reports.front(), HasSubstr("\"after it\""));
  EXPECT_THAT(reports.front(), HasSubstr("rank 0: "));
  EXPECT_THAT(reports.front(),
              HasSubstr("in the pipeline \"p\": \"F0.1\" (the forward pass of stage 0 for "
                        "micro-batch 1), for "));
  EXPECT_GE(stalls, 1);
}

// ---- tensors of all kinds ----

TEST(PipelineTest, TensorsWithoutGradientsAndUnusedOnesTravel) {
  RunTorchRanks(2, [](int) {
    struct FirstImpl : torch::nn::Module {
      torch::nn::Linear linear = register_module("linear", torch::nn::Linear(3, 3));
      std::vector<torch::Tensor> forward(const std::vector<torch::Tensor>& inputs) {
        const torch::Tensor y = linear->forward(inputs[0]);
        return {y, inputs[1], y.detach(), y * 2, torch::empty({0, 2})};
      }
    };
    struct SecondImpl : torch::nn::Module {
      torch::Tensor scale = register_parameter("scale", torch::ones({3}));
      std::vector<torch::Tensor> forward(const std::vector<torch::Tensor>& inputs) {
        EXPECT_EQ(inputs.size(), 5U);
        EXPECT_EQ(inputs[1].scalar_type(), torch::kLong);
        EXPECT_FALSE(inputs[2].requires_grad());
        EXPECT_EQ(inputs[4].numel(), 0);
        return {(inputs[0] * scale).index_select(1, inputs[1][0])};  // and nothing of inputs[3]
      }
    };
    Pipeline pipeline(
        {[] { return PipelineStage(std::make_shared<FirstImpl>()); },
         [] { return PipelineStage(std::make_shared<SecondImpl>()); }},
        [](const torch::Tensor& output, const torch::Tensor&) { return output.sum(); },
        PipelineOptions().micro_batches(2));
    const torch::Tensor x = torch::arange(12.0).view({4, 3});
    const torch::Tensor places = torch::tensor({{2L}, {2L}, {2L}, {2L}});
    pipeline.train_batch({x, places}, {torch::zeros({4})});
    if (!pipeline.is_first()) return;
    // The third output alone is in the loss.
    const torch::Tensor gradient = pipeline.named_parameters()["0.linear.weight"].grad();
    EXPECT_TRUE(torch::equal(gradient[2], x.sum(0) / 2)) << gradient;
    EXPECT_TRUE(torch::equal(gradient.narrow(0, 0, 2), torch::zeros({2, 3}))) << gradient;
  });
}

// A unsplit model of layers, of which some work in place.
torch::nn::Sequential Layers() {
  torch::manual_seed(1);
  return torch::nn::Sequential(
      torch::nn::Linear(4, 16), torch::nn::ReLU(torch::nn::ReLUOptions(true)),
      torch::nn::Linear(16, 4), torch::nn::ReLU(torch::nn::ReLUOptions(true)),
      torch::nn::Linear(4, 4), torch::nn::Linear(4, 2));
}

std::vector<std::string> NamesOf(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& parameter : module.named_parameters()) names.push_back(parameter.key());
  return names;
}

TEST(PipelineTest, LayersAreCutAndKeepTheirNames) {
  torch::nn::Sequential whole = Layers();
  torch::manual_seed(2);
  const torch::Tensor input = torch::randn({8, 4});
  const torch::Tensor target = torch::randn({8, 2});
  for (int i = 0; i < 4; ++i) {
    (torch::mse_loss(whole->forward(input.narrow(0, 2 * i, 2)), target.narrow(0, 2 * i, 2)) / 4)
        .backward();
  }
  std::vector<torch::nn::Sequential> copies;
  for (int rank = 0; rank < 2; ++rank) copies.push_back(Layers());
  const auto check = [&](const PipelineOptions& options, const std::vector<std::string>& of_first) {
    for (auto& copy : copies) copy->zero_grad();
    RunTorchRanks(2, [&](int rank) {
      Pipeline pipeline(copies[static_cast<std::size_t>(rank)], torch::nn::MSELoss(), options);
      if (rank == 0 && !of_first.empty()) {
        EXPECT_EQ(NamesOf(pipeline), of_first);
      }
      pipeline.train_batch(input, target);
      for (const auto& parameter : pipeline.named_parameters()) {
        EXPECT_TRUE(torch::equal(parameter.value().grad(),
                                 whole->named_parameters()[parameter.key()].grad()))
            << parameter.key();
      }
    });
  };
  const PipelineOptions options = PipelineOptions().micro_batches(4);
  check(options, {"0.weight", "0.bias", "2.weight", "2.bias"});
  check(PipelineOptions(options).partition("parameters"), {"0.weight", "0.bias"});
  check(PipelineOptions(options).partition("time").sample(input.narrow(0, 0, 2)), {});
  check(PipelineOptions(options).schedule("interleaved_1f1b").stages_per_rank(3), {});
}

TEST(PipelineTest, FactoriesAreCalledOnTheRanksOfTheirStagesAlone) {
  RunTorchRanks(2, [](int rank) {
    std::vector<int> made;
    std::vector<PipelineFactory> layers;
    for (int i = 0; i < 4; ++i) {
      layers.emplace_back([&made, i] {
        made.push_back(i);
        return torch::nn::Linear(i + 2, i + 3);
      });
    }
    const Pipeline pipeline(layers, torch::nn::MSELoss(), PipelineOptions().partition("uniform"));
    EXPECT_EQ(made, rank == 0 ? (std::vector<int>{0, 1}) : (std::vector<int>{2, 3}));
    EXPECT_EQ(NamesOf(pipeline).front(), rank == 0 ? "0.weight" : "2.weight");
  });
}

// A module with one parameter.
struct ScaleImpl : torch::nn::Module {
  torch::Tensor w = register_parameter("w", torch::full({1}, 2.0));
};

TEST(PipelineTest, TensorsAndGradientsKeepTheirStridesBetweenStages) {
  constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;
  const torch::Tensor batch = torch::arange(96.0).reshape({4, 2, 3, 4}) / 50;
  RunTorchRanks(2, [&](int) {
    int passes = 0;
    const std::vector<PipelineFactory> factories = {
        [&passes] {
          const auto module = std::make_shared<ScaleImpl>();
          const auto forward = [module, &passes](const pipelines::Tensors& x) {
            const torch::Tensor y = x[0] * module->w;
            // The second micro-batch has other strides, and travels with those of the first.
            const torch::Tensor one = ++passes == 2 ? y : y.contiguous(kChannelsLast);
            if (passes == 1) {
              one.register_hook([](const torch::Tensor& gradient) {
                EXPECT_TRUE(gradient.is_contiguous(kChannelsLast));
              });
            }
            return pipelines::Tensors{one, y.transpose(1, 3), y.narrow(3, 0, 1)};
          };
          return PipelineStage(forward, module);
        },
        [] {
          const auto module = std::make_shared<ScaleImpl>();
          const auto forward = [module](const pipelines::Tensors& x) {
            EXPECT_TRUE(x[0].is_contiguous(kChannelsLast));
            EXPECT_TRUE(x[1].transpose(1, 3).is_contiguous());
            EXPECT_TRUE(x[2].is_contiguous());  // it was not dense
            EXPECT_TRUE(x[1].transpose(1, 3).equal(x[0]));
            EXPECT_TRUE(x[2].equal(x[0].narrow(3, 0, 1)));
            return pipelines::Tensors{x[0].contiguous() * module->w + x[1].transpose(1, 3)};
          };
          return PipelineStage(forward, module);
        }};
    const auto loss = [](const torch::Tensor& output, const torch::Tensor& target) {
      return (output * target).mean();
    };
    Pipeline pipeline(factories, PipelineLoss(loss), PipelineOptions().micro_batches(4));
    // The output is x w0 (w1 + 1).
    const double squares = batch.square().mean().item<double>();
    EXPECT_NEAR(pipeline.train_batch(batch, batch), 6 * squares, 1e-5);
    EXPECT_NEAR(pipeline.parameters()[0].grad().item<double>(),
                (pipeline.is_first() ? 3 : 2) * squares, 1e-5);
  });
}

TEST(PipelineTest, SeveralPipelinesOfAProgramDoNotMix) {
  const Model model;
  RunTorchRanks(2, [&](int) {
    auto first = std::make_unique<Pipeline>(model.Factories(), pipelines::Loss, model.Options());
    Pipeline second(model.Factories(), pipelines::Loss, model.Options().name("second"));
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : second.parameters()) parameter.fill_(0.5);
      for (auto& parameter : first->parameters()) parameter.fill_(0);
    }
    const auto input = torch::ones({4, model.width});
    EXPECT_EQ(first->train_batch(input, input), 1);
    const double loss = second.train_batch(input, input);
    EXPECT_NE(loss, 1);
    EXPECT_EQ(first->train_batch(input, input), 1);
    first.reset();
    Pipeline third(model.Factories(), pipelines::Loss, model.Options().name("third"));
    EXPECT_EQ(second.train_batch(input, input), loss);
  });
}

TEST(PipelineTest, EvaluationGivesTheOutputsOnTheLastRank) {
  const Model model;
  RunTorchRanks(2, [&](int) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options());
    for (const int size : {4, 8}) {
      std::vector<torch::Tensor> outputs;
      const auto batch = torch::ones({size, model.width});
      const double loss = pipeline.evaluate_batch({batch}, {batch}, &outputs);
      ASSERT_EQ(outputs.size(), pipeline.is_last() ? 1U : 0U);
      if (!pipeline.is_last()) continue;
      EXPECT_EQ(outputs[0].size(0), size);
      EXPECT_FALSE(outputs[0].requires_grad());
      EXPECT_NEAR(torch::mse_loss(outputs[0], batch).item<double>(), loss, 1e-6);
    }
  });
}

TEST(PipelineTest, ClippingCountsTheWholeModelAndTiedParametersOnce) {
  Model model;
  model.stages = 2;
  model.ties = {{"0.linear.weight", "1.linear.weight"}};
  const Whole whole(model);
  whole.Train(model.Input(), model.Target());
  double squares = 0;
  for (const char* name : {"0.linear.weight", "0.linear.bias", "1.linear.bias"}) {
    squares += whole.Parameter(name).grad().square().sum().item<double>();
  }
  const torch::Tensor input = model.Input();
  const torch::Tensor target = model.Target();
  RunTorchRanks(2, [&](int) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options());
    torch::NoGradGuard no_grad;
    for (auto& parameter : pipeline.named_parameters()) {
      parameter.value().copy_(whole.Parameter(parameter.key()));
    }
    torch::optim::SGD optimizer(pipeline.parameters(), 0.1);
    pipeline.train_batch(input, target);
    const double norm = pipeline.clip_grad_norm_(optimizer, 0.01);
    EXPECT_NEAR(norm, std::sqrt(squares), 1e-6);
    for (auto& parameter : pipeline.named_parameters()) {
      EXPECT_TRUE(torch::allclose(parameter.value().grad(),
                                  whole.Parameter(parameter.key()).grad() * (0.01 / norm), 1e-3));
    }
  });
}

TEST(PipelineTest, AnOptimizerThatAveragesInEachPassIsRefused) {
  const Model model;
  std::barrier all_have_pipelines(2);
  RunTorchRanks(2, [&](int) {
    const Mesh grid = mesh({{"data", 1}, {"pipe", 2}});
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options().mesh(grid));
    const auto optimizer = DistributedOptimizer(
        torch::optim::SGD(pipeline.parameters(), 0.5), pipeline.named_parameters(),
        DistributedOptimizerOptions().process_set(grid.set("data")));
    const torch::Tensor batch = torch::ones({4, model.width});
    all_have_pipelines.arrive_and_wait();
    try {
      pipeline.train_batch(batch, batch);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {  // the first to come ends the job
      EXPECT_THAT(error.what(), AllOf(HasSubstr("at the end of each backward() after 1"),
                                      HasSubstr("the optimizer_options() of the pipeline")));
    }
  });
}

// Two copies of a pipeline with different halves of the data, whose optimizers average.
TEST(PipelineTest, CopiesAverageOverTheDataAxis) {
  Model model;
  model.stages = 4;
  model.ties = {{"0.linear.weight", "3.linear.weight"}};
  const Whole whole(model);
  torch::optim::SGD sgd(whole.parameters(), 0.5);
  std::map<std::string, torch::Tensor> start;
  for (int stage = 0; stage < model.stages; ++stage) {
    for (const char* of : {".linear.weight", ".linear.bias"}) {
      const std::string name = std::to_string(stage) + of;
      start[name] = whole.Parameter(name).detach().clone();
    }
  }
  std::vector<torch::Tensor> inputs;
  std::vector<torch::Tensor> targets;
  for (int i = 0; i < 6; ++i) {
    inputs.push_back(model.Input(i));
    targets.push_back(model.Target(i));
  }
  for (int step = 0; step < 3; ++step) {
    std::vector<torch::Tensor> sums;
    for (int copy = 0; copy < 2; ++copy) {
      sgd.zero_grad();
      whole.Train(inputs[2 * step + copy], targets[2 * step + copy]);
      for (const auto& parameter : whole.parameters()) sums.push_back(parameter.grad().clone());
    }
    const auto parameters = whole.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = (sums[i] + sums[i + parameters.size()]) / 2;
    }
    sgd.step();
  }
  for (const Shard shard : {Shard::None, Shard::OptimizerState, Shard::Gradients}) {
    RunTorchRanks(4, [&](int) {
      const Mesh grid = mesh({{"data", 2}, {"pipe", 2}});
      Pipeline pipeline(model.Factories(), pipelines::Loss,
                        model.Options().schedule("interleaved_1f1b").mesh(grid));
      {
        torch::NoGradGuard no_grad;
        for (auto& parameter : pipeline.named_parameters()) {
          parameter.value().copy_(start.at(parameter.key()));
        }
      }
      auto optimizer = DistributedOptimizer(torch::optim::SGD(pipeline.parameters(), 0.5),
                                            pipeline.named_parameters(),
                                            pipeline.optimizer_options().shard(shard));
      const int copy = grid.coordinate("data");
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        pipeline.train_batch(inputs[2 * step + copy], targets[2 * step + copy]);
        optimizer.step();
      }
      for (const auto& parameter : pipeline.named_parameters()) {
        EXPECT_TRUE(
            torch::allclose(parameter.value(), whole.Parameter(parameter.key()), 1e-4, 1e-6))
            << parameter.key();
      }
    });
  }
}

}  // namespace
}  // namespace sirtaki::tests
