// Pipelines that are used in another way than they are meant to be: the numbers are right all the same, or
// an error says what to do.
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sirtaki/broadcast.h"
#include "sirtaki/checkpoint.h"
#include "sirtaki/collectives.h"
#include "sirtaki/mesh.h"
#include "sirtaki/optimizer.h"
#include "sirtaki/pipeline.h"
#include "tests/torch/parallel/pipeline_training.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using pipelines::Model;
using testing::AllOf;
using testing::HasSubstr;
using Tensors = std::vector<torch::Tensor>;

// Hands on what it counts up in its next forward pass. `how` takes it from the buffer.
struct CountsImpl : torch::nn::Module {
  explicit CountsImpl(std::function<torch::Tensor(const torch::Tensor&)> how)
      : take(std::move(how)) {}
  torch::Tensor count = register_buffer("count", torch::zeros({2}));
  torch::Tensor weight = register_parameter("weight", torch::ones({1}));
  std::function<torch::Tensor(const torch::Tensor&)> take;
  Tensors forward(const Tensors& x) {
    count.add_(1);
    return {x[0] * weight, take(count), x[0].sum()};
  }
};

// The sum over micro-batches of ones times 1, 2, 3, 4; the loss is the mean of 2 of each.
double TrainsWithCounts(const std::function<torch::Tensor(const torch::Tensor&)>& take,
                        const std::string& schedule) {
  Pipeline pipeline(
      {[&] { return PipelineStage(std::make_shared<CountsImpl>(take)); },
       [] {
         return PipelineStage([](const Tensors& x) { return Tensors{x[0] * x[1][0]}; }, nullptr);
       }},
      [](const torch::Tensor& output, const torch::Tensor&) { return output.sum(); },
      PipelineOptions().micro_batches(4).schedule(schedule));
  return pipeline.train_batch(torch::ones({4, 2}), torch::ones({4, 2}));
}

TEST(PipelineMisuseTest, ABufferThatIsWrittenAgainArrivesAsItWas) {
  for (const int ranks : {1, 2}) {
    for (const char* schedule : {"gpipe", "1f1b"}) {
      if (ranks == 1 && schedule == std::string("1f1b")) continue;  // which needs a rank a stage
      RunTorchRanks(ranks, [&](int) {
        const double wanted = 2 * (1 + 2 + 3 + 4) / 4.0;
        const auto itself = [](const torch::Tensor& count) { return count; };
        const auto view = [](const torch::Tensor& count) { return count.narrow(0, 0, 1); };
        EXPECT_EQ(TrainsWithCounts(itself, schedule), wanted) << schedule;
        EXPECT_EQ(TrainsWithCounts(view, schedule), wanted) << schedule;
      });
    }
  }
}

TEST(PipelineMisuseTest, OutputsOfAnEvaluationAreThoseOfEachMicroBatch) {
  RunTorchRanks(1, [&](int) {
    Pipeline pipeline(
        {[&] {
          return PipelineStage(
              std::make_shared<CountsImpl>([](const torch::Tensor& count) { return count; }));
        }},
        [](const Tensors& outputs, const Tensors&) { return outputs[0].sum(); },
        PipelineOptions().micro_batches(2));
    Tensors outputs;
    pipeline.evaluate_batch(Tensors{torch::ones({2, 1})}, Tensors{torch::ones({2, 1})}, &outputs);
    EXPECT_TRUE(torch::equal(outputs.at(1), torch::tensor({1.0F, 1.0F, 2.0F, 2.0F})))
        << outputs.at(1);
    EXPECT_TRUE(torch::equal(outputs.at(2), torch::ones({2}))) << "one of each micro-batch";
  });
}

TEST(PipelineMisuseTest, ARecomputedStageThatWorksInPlaceIsNamedWithTheCure) {
  RunTorchRanks(1, [&](int) {
    Pipeline pipeline({[] { return PipelineStage(torch::nn::Linear(2, 2)); },
                       [] {
                         return PipelineStage(
                             [](const Tensors& x) { return Tensors{x[0].mul_(2)}; }, nullptr);
                       }},
                      torch::nn::MSELoss(), PipelineOptions().schedule("gpipe").recompute({1}));
    const torch::Tensor ones = torch::ones({2, 2});
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument, [&] { pipeline.train_batch(ones, ones); }),
        AllOf(HasSubstr("stage 1 on rank 0, which is recomputed"), HasSubstr("option recompute")));
  });
}

TEST(PipelineMisuseTest, MemoryThatIsWrittenAgainBehindABackIsRefused) {
  RunTorchRanks(1, [&](int) {
    const auto hidden = [](const torch::Tensor& count) { return count.detach(); };
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { TrainsWithCounts(hidden, "gpipe"); }),
                AllOf(HasSubstr("was changed in place"), HasSubstr("clone()")));
  });
}

TEST(PipelineMisuseTest, AnOperatorsResultIsNotCopied) {
  const void* made = nullptr;
  const void* arrived = nullptr;
  RunTorchRanks(1, [&](int) {
    Pipeline pipeline({[&] {
                         torch::nn::Linear linear(2, 2);
                         return PipelineStage(
                             [&made, linear](const Tensors& x) mutable {
                               const torch::Tensor y = torch::tanh(linear->forward(x[0]));
                               made = y.const_data_ptr();
                               return Tensors{y};
                             },
                             linear.ptr());
                       },
                       [&] {
                         return PipelineStage(
                             [&arrived](const Tensors& x) {
                               arrived = x[0].const_data_ptr();
                               return Tensors{x[0] * 1};
                             },
                             nullptr);
                       }},
                      torch::nn::MSELoss(), PipelineOptions().schedule("gpipe"));
    pipeline.train_batch(torch::ones({2, 2}), torch::ones({2, 2}));
    EXPECT_EQ(made, arrived);
    pipeline.evaluate_batch(torch::ones({2, 2}), torch::ones({2, 2}));
    EXPECT_EQ(made, arrived);
  });
}

// ---- batches ----

void ExpectBatchErrors(const std::function<void(Pipeline&, int rank)>& batch,
                       const std::vector<std::string>& words_of_ranks) {
  const Model model;
  RunTorchRanks(static_cast<int>(words_of_ranks.size()), [&](int rank) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options());
    allreduce(torch::ones({1}));
    try {
      batch(pipeline, rank);
      ADD_FAILURE() << "nothing was thrown on rank " << rank;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(words_of_ranks[static_cast<std::size_t>(rank)]));
    }
  });
}

TEST(PipelineMisuseTest, OtherRowsOfInputsAndTargetsAreNamedOnBothRanks) {
  const std::string words =
      "the batch has 8 samples in the inputs of stage 0 on rank 0, and 4 in the targets of stage 1";
  const auto train = [](Pipeline& pipeline, int) {
    pipeline.train_batch(torch::ones({8, 5}), torch::ones({4, 5}));
  };
  ExpectBatchErrors(train, {words, words});
  // A later batch tells no shapes.
  const auto second = [](Pipeline& pipeline, int) {
    pipeline.train_batch(torch::ones({8, 5}), torch::ones({8, 5}));
    pipeline.train_batch(torch::ones({8, 5}), torch::ones({4, 5}));
  };
  ExpectBatchErrors(second, {words, words});
  const auto evaluate = [](Pipeline& pipeline, int) {
    pipeline.evaluate_batch(torch::ones({8, 5}), torch::ones({4, 5}));
  };
  ExpectBatchErrors(evaluate, {words, words});
  const Model model;
  RunTorchRanks(1, [&](int) {
    Pipeline alone(model.Factories(), pipelines::Loss, model.Options().schedule("gpipe"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          alone.train_batch(torch::ones({8, 5}), torch::ones({4, 5}));
                        }),
                HasSubstr("8 samples in the inputs"));
  });
}

TEST(PipelineMisuseTest, InputsOfOtherRowsAreRefused) {
  const auto train = [](Pipeline& pipeline, int) {
    pipeline.train_batch(Tensors{torch::ones({8, 5}), torch::ones({12, 5})},
                         Tensors{torch::ones({8, 5})});
  };
  const std::string words = "differ in samples: 8 in tensor 0, 12 in tensor 1";
  ExpectBatchErrors(train, {words, words});
}

TEST(PipelineMisuseTest, TrainingOnOneRankAndEvaluatingOnAnotherIsNamedOnBoth) {
  const torch::Tensor ones = torch::ones({8, 5});
  for (const int trains : {0, 1}) {
    for (const bool later : {false, true}) {
      const auto other = [&](Pipeline& pipeline, int rank) {
        if (later) pipeline.train_batch(ones, ones);
        rank == trains ? pipeline.train_batch(ones, ones) : pipeline.evaluate_batch(ones, ones);
      };
      const std::string words =
          trains == 0 ? "stage 0 on rank 0 is in train_batch(), and this rank in evaluate_batch()"
                      : "stage 0 on rank 0 is in evaluate_batch(), and this rank in train_batch()";
      ExpectBatchErrors(other, {words, words});
    }
  }
}

TEST(PipelineMisuseTest, TrainingInInferenceModeIsRefused) {
  const Model model;
  RunTorchRanks(1, [&](int) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options().schedule("gpipe"));
    const c10::InferenceMode inference;
    const torch::Tensor ones = torch::ones({4, 5});
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { pipeline.train_batch(ones, ones); }),
                HasSubstr("inference mode"));
    EXPECT_GT(pipeline.evaluate_batch(ones, ones), 0);
  });
}

TEST(PipelineMisuseTest, EvaluationWithoutTargetsGivesOutputsAndNoLoss) {
  const Model model;
  RunTorchRanks(2, [&](int rank) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options());
    const torch::Tensor input = torch::ones({4, 5});
    Tensors outputs, wanted;
    EXPECT_TRUE(std::isnan(pipeline.evaluate_batch(Tensors{input}, Tensors(), &outputs)));
    EXPECT_FALSE(std::isnan(pipeline.evaluate_batch(Tensors{input}, Tensors{input}, &wanted)));
    ASSERT_EQ(outputs.size(), rank == 1 ? 1U : 0U);
    if (rank == 1) {
      EXPECT_TRUE(torch::equal(outputs[0], wanted[0]));
    }
  });
}

TEST(PipelineMisuseTest, ATimeoutNamesThePipeline) {
  const Model model;
  RunTorchRanks(2, [&](int rank) {
    Pipeline pipeline(model.Factories(), pipelines::Loss,
                      model.Options().name("mine").timeout(std::chrono::seconds(1)));
    const torch::Tensor ones = torch::ones({4, 5});
    const std::string text = "the pipeline \"mine\": stage 1 on rank 1 waits for activations";
    if (rank == 1) {
      EXPECT_THAT(ErrorOf(ErrorCode::TimedOut, [&] { pipeline.train_batch(ones, ones); }),
                  HasSubstr(text));
    } else {
      EXPECT_THAT(ErrorOf(ErrorCode::Aborted, [&] { barrier(); }), HasSubstr(text));
    }
  });
}

// ---- optimizers ----

TEST(PipelineMisuseTest, TheStateOfAnotherStagesOptimizerIsRefused) {
  const Model model;
  RunTorchRanks(2, [&](int) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options());
    const torch::Tensor ones = torch::ones({4, 5});
    torch::optim::Adam adam(pipeline.parameters());
    pipeline.train_batch(ones, ones);
    adam.step();
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { broadcast_optimizer_state(adam, 0); }),
                AllOf(HasSubstr("of stage 0 of the pipeline"), HasSubstr("of stage 1")));
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] {
                          DistributedOptimizer(torch::optim::SGD(pipeline.parameters(), 0.1),
                                               pipeline.named_parameters());
                        }),
                HasSubstr("optimizer_options()"));
  });
}

TEST(PipelineMisuseTest, ADistributedLbfgsIsRefused) {
  const Model model;
  RunTorchRanks(2, [&](int) {
    const Mesh grid = mesh({{"data", 1}, {"pipe", 2}});
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options().mesh(grid));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          DistributedOptimizer(torch::optim::LBFGS(pipeline.parameters()),
                                               pipeline.named_parameters(),
                                               pipeline.optimizer_options());
                        }),
                HasSubstr("LBFGS cannot train a pipeline"));
  });
}

TEST(PipelineMisuseTest, ClippingOfOneStageIsRefusedWithTheCure) {
  const Model model;
  RunTorchRanks(2, [&](int) {
    const Mesh grid = mesh({{"data", 1}, {"pipe", 2}});
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options().mesh(grid));
    auto optimizer =
        DistributedOptimizer(torch::optim::SGD(pipeline.parameters(), 0.1),
                             pipeline.named_parameters(), pipeline.optimizer_options());
    torch::optim::SGD plain(pipeline.parameters(), 0.1);
    for (torch::optim::Optimizer* one : {static_cast<torch::optim::Optimizer*>(&optimizer),
                                         static_cast<torch::optim::Optimizer*>(&plain)}) {
      EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [&] { clip_grad_norm_(*one, 1.0); }),
                  HasSubstr("call clip_grad_norm_ of the pipeline"));
    }
  });
}

// Their parameters have the same names and shapes in lists of the program's own.
TEST(PipelineMisuseTest, ParametersOfAnotherStageAreNotTakenForOnesOwn) {
  struct Holder : torch::nn::Module {
    explicit Holder(const torch::Tensor& parameter) { register_parameter("w", parameter); }
  };
  const Model model;
  RunTorchRanks(2, [&](int) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options());
    const torch::Tensor first = pipeline.parameters().front();
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch, [&] { broadcast_parameters(Tensors{first}, 0); }),
                HasSubstr("stage"));
    Holder holder(first);
    EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                        [&] { save_checkpoint("nowhere/x.pt", Checkpoint().model(holder)); }),
                HasSubstr("stage"));
  });
}

TEST(PipelineMisuseTest, SeveralOptimizersAreClippedTogether) {
  const Model model;
  RunTorchRanks(2, [&](int) {
    Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options());
    const torch::Tensor ones = torch::ones({4, 5});
    pipeline.train_batch(ones, ones);
    torch::optim::SGD all(pipeline.parameters(), 0.1);
    const double wanted = pipeline.clip_grad_norm_(all, 1e9);
    const std::vector<torch::Tensor> mine = pipeline.parameters();
    torch::optim::SGD first(Tensors{mine[0]}, 0.1), second(Tensors{mine[1]}, 0.1);
    EXPECT_NEAR(pipeline.clip_grad_norm_({&first, &second}, wanted / 2), wanted, 1e-5 * wanted);
    EXPECT_NEAR(pipeline.clip_grad_norm_(all, 1e9), wanted / 2, 1e-4 * wanted);
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument,
                [&] { pipeline.clip_grad_norm_(std::vector<torch::optim::Optimizer*>(), 1); }),
        HasSubstr("no optimizer"));
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          pipeline.clip_grad_norm_({&first, &all}, 1);
                        }),
                HasSubstr("two optimizers of one parameter"));
  });
}

TEST(PipelineMisuseTest, ACopyIsRefused) {
  const Model model;
  RunTorchRanks(1, [&](int) {
    const Pipeline pipeline(model.Factories(), pipelines::Loss, model.Options().schedule("gpipe"));
    EXPECT_THAT(ErrorOf(ErrorCode::Unsupported, [&] { pipeline.clone(); }),
                HasSubstr("save_full()"));
  });
}

}  // namespace
}  // namespace sirtaki::tests
