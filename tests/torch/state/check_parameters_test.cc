#include "sirtaki/check_parameters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <vector>

#include "sirtaki/barrier.h"
#include "sirtaki/collectives.h"
#include "sirtaki/optimizer.h"
#include "tests/torch/torch_ranks.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Named = std::vector<std::pair<std::string, torch::Tensor>>;

std::string Difference(const Named& tensors) {
  return ErrorOf(ErrorCode::Mismatch, [&] { check_parameters(tensors); });
}

// Every type, and every way for elements to lie in memory.
Named Zoo() {
  const auto wave = Waves({4, 5}, 0);
  return {{"double", wave.clone()},
          {"float", wave.to(torch::kFloat)},
          {"half", wave.to(torch::kHalf)},
          {"bfloat16", wave.to(torch::kBFloat16)},
          {"bool", wave > 0},
          {"long", (wave * 100).to(torch::kLong)},
          {"byte", (wave.abs() * 100).to(torch::kByte)},
          {"turned", wave.clone().t()},
          {"expanded", torch::ones({1}).expand({1000})},
          {"every other", Waves({10}, 1).slice(0, 0, 10, 2)},
          {"empty", torch::zeros({0, 3})},
          {"scalar", torch::tensor(3.5)},
          {"undefined", torch::Tensor()},
          {"complex", torch::complex(wave, -wave)}};
}

TEST(CheckParametersTest, EqualTensorsPass) {
  for (const int size : {1, 2, 3}) {
    RunTorchRanks(size, [](int) {
      check_parameters(Zoo());
      check_parameters(Named());
      SmallNet net;
      check_parameters(net);
      check_parameters(net);
    });
  }
}

TEST(CheckParametersTest, AFlippedBitIsFoundAndNamed) {
  for (const int size : {2, 3}) {
    for (const std::size_t which : {0u, 1u, 2u, 3u, 5u, 6u, 13u}) {
      RunTorchRanks(size, [&](int rank) {
        Named tensors = Zoo();
        auto& [name, tensor] = tensors[which];
        if (rank == 1) {
          auto* bytes = static_cast<unsigned char*>(tensor.mutable_data_ptr());
          bytes[13 * tensor.element_size()] ^= 1;  // the lowest bit of element [2, 3]
        }
        const auto text = Difference(tensors);
        EXPECT_THAT(text, AllOf(HasSubstr("check_parameters: \"" + name + "\" "),
                                HasSubstr(" differs: digest 0x"),
                                HasSubstr("the first different element, [2, 3], is "),
                                HasSubstr(" on rank 1"), Not(HasSubstr("tensors that differ"))));
        EXPECT_THAT(text, HasSubstr(size == 2 ? " on rank 0; " : " on ranks 0, 2; "));
      });
    }
  }
}

TEST(CheckParametersTest, SaysTheValues) {
  RunTorchRanks(3, [](int rank) {
    auto wide = torch::zeros({2, 3});
    wide[1][2] = rank == 2 ? 0.25 : 1.5;
    EXPECT_THAT(Difference({{"w", wide}}),
                AllOf(HasSubstr("\"w\" float32 [2, 3] differs"), HasSubstr("on ranks 0-1; "),
                      HasSubstr("[1, 2], is 1.5 (0x3fc00000) on rank 0 and 0.25 (0x3e800000) on "
                                "rank 2")));
    // Transposed: the index is the tensor's, not the memory's.
    EXPECT_THAT(Difference({{"w", wide.t()}}), HasSubstr("[2, 1], is 1.5"));
    EXPECT_THAT(Difference({{"flag", torch::tensor(rank == 1)}}),
                HasSubstr("[], is false (0x00) on rank 0 and true (0x01) on rank 1"));
    EXPECT_THAT(Difference({{"steps", torch::tensor({std::int64_t{5}, std::int64_t{7} + rank})}}),
                HasSubstr("[1], is 7 (0x0000000000000007) on rank 0 and 8 (0x0000000000000008) on "
                          "rank 1"));
  });
}

TEST(CheckParametersTest, ComparesBitsAndNotNumbers) {
  RunTorchRanks(2, [](int rank) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    check_parameters(Named{{"w", torch::tensor({nan, 1.0, -nan}, torch::kDouble)}});
    EXPECT_THAT(Difference({{"w", torch::tensor({rank == 0 ? 0.0 : -0.0}, torch::kDouble)}}),
                HasSubstr("is 0 (0x0000000000000000) on rank 0 and -0 (0x8000000000000000) on rank "
                          "1, equal as numbers and different in their bits"));
  });
}

TEST(CheckParametersTest, CountsTheTensorsThatDiffer) {
  RunTorchRanks(2, [](int rank) {
    EXPECT_THAT(Difference({{"a", torch::ones({2})},
                            {"b", torch::full({2}, rank)},
                            {"c", torch::ones({2})},
                            {"d", torch::full({2}, 2 * rank)}}),
                AllOf(HasSubstr("\"b\" int64 [2] differs"),
                      HasSubstr("it is the first of 2 tensors that differ")));
  });
}

TEST(CheckParametersTest, NamesTypesAndShapesComeFirst) {
  RunTorchRanks(3, [](int rank) {
    const auto a = torch::full({2}, rank);
    EXPECT_THAT(Difference({{"a", a}, {"w", torch::ones({rank == 1 ? 3 : 4})}}),
                AllOf(HasSubstr("\"w\" float32 [4] on ranks 0, 2"),
                      HasSubstr("\"w\" float32 [3] on rank 1"), Not(HasSubstr("\"a\""))));
    EXPECT_THAT(Difference({{rank == 0 ? "v" : "w", torch::ones({2})}}),
                AllOf(HasSubstr("\"v\" float32 [2] on rank 0"),
                      HasSubstr("\"w\" float32 [2] on ranks 1-2")));
    EXPECT_THAT(Difference({{"w", torch::ones({2}, rank == 0 ? torch::kFloat : torch::kHalf)}}),
                HasSubstr("\"w\" float16 [2] on ranks 1-2"));
    Named more = {{"w", torch::ones({2})}};
    if (rank == 2) more.emplace_back("x", torch::ones({2}));
    EXPECT_THAT(Difference(more), AllOf(HasSubstr("nothing more on ranks 0-1"),
                                        HasSubstr("\"x\" float32 [2] on rank 2")));
    EXPECT_THAT(Difference({{"w", rank == 0 ? torch::ones({2}) : torch::Tensor()}}),
                HasSubstr("\"w\" undefined on ranks 1-2"));
  });
}

TEST(CheckParametersTest, BuffersOfAModuleCount) {
  RunTorchRanks(2, [](int rank) {
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(0.5);
    check_parameters(*net);
    net->forward(torch::full({4, 2}, 1.0 * rank));
    const auto text = ErrorOf(ErrorCode::Mismatch, [&] { check_parameters(*net); });
    EXPECT_THAT(text, HasSubstr("check_parameters: \"buffer 1.running_mean\" float32 [3] differs"));
  });
}

TEST(CheckParametersTest, ATensorThatCannotBeComparedIsToldToAllRanks) {
  RunTorchRanks(2, [](int rank) {
    const auto w = rank == 0 ? torch::eye(3) : torch::eye(3).to_sparse();
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] {
                          check_parameters(Named{{"w", w}});
                        }),
                AllOf(HasSubstr("check_parameters: \"w\": the tensor has layout Sparse"),
                      HasSubstr("on rank 1")));
    check_parameters(Named{{"w", torch::eye(3)}});
  });
}

TEST(CheckParametersTest, NamesTheRanksThatHaveNotJoined) {
  for (const int joined : {0, 1}) {
    SCOPED_TRACE(joined);
    RunTorchRanks(3, [joined](int rank) {
      if (rank != joined) {
        const auto text = Difference({{"w", torch::full({3}, rank == 2 ? 1 : 0)}});
        const std::string other = std::to_string(1 - joined);
        EXPECT_THAT(text, AllOf(HasSubstr("on rank " + other + "; "), HasSubstr("on rank 2; "),
                                HasSubstr("the first different element, [0], is 0 "),
                                HasSubstr("on rank " + other + " and 1 ")));
      }
      join();
    });
  }
}

// A join ends with ranks that have made different numbers of steps.
TEST(CheckParametersTest, StepsCountFromTheLastJoin) {
  core::Config config;
  config.stall_limit = std::chrono::seconds(20);
  RunTorchRanks(
      2,
      [](int rank) {
        const auto weight = torch::zeros({2}, torch::requires_grad());
        auto optimizer =
            DistributedOptimizer(torch::optim::SGD({weight}, 0.5), NamedTensors{{"w", weight}},
                                 DistributedOptimizerOptions().check_parameters_every(2));
        const auto step = [&] {
          optimizer.zero_grad();
          (weight.sum() * (rank + 1)).backward();
          optimizer.step();
        };
        for (int i = 0; i < 1 + rank; ++i) step();
        broadcast_(weight.detach(), join());
        for (int i = 0; i < 3; ++i) step();
        weight.detach().add_(rank);
        EXPECT_THAT(ErrorOf(ErrorCode::Mismatch,
                            [&] {
                              for (int i = 0; i < 2; ++i) step();
                            }),
                    testing::HasSubstr("\"w\""));
      },
      config);
}

}  // namespace
}  // namespace sirtaki::tests
