// Parameters and gradients that cannot be reduced: every rank learns it, none waits or dies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sirtaki/optimizer.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using torch::optim::SGD;

DistributedOptimizer<SGD> OptimizerOf(const torch::Tensor& parameter, const std::string& name) {
  return DistributedOptimizer<SGD>(SGD({parameter}, 0.1), NamedTensors{{name, parameter}});
}

TEST(OptimizerRefusalTest, MoreDimensionsThanAMessageHolds) {
  RunTorchRanks(2, [](int rank) {
    auto parameter = torch::empty(std::vector<std::int64_t>(65, 1)).requires_grad_();
    auto optimizer = OptimizerOf(parameter, "w");
    // Also without a gradient.
    if (rank == 0) parameter.mutable_grad() = torch::empty(parameter.sizes());
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); });
    EXPECT_THAT(text, AllOf(HasSubstr("gradient/w"), HasSubstr("65 dimensions; at most 64")));
  });
}

TEST(OptimizerRefusalTest, AGradientThatOneRankHasNoMemoryFor) {
  RunTorchRanks(2, [](int rank) {
    const std::vector<std::int64_t> huge{std::int64_t{1} << 50};
    auto parameter = torch::ones({1}).expand(huge).detach().requires_grad_();
    auto optimizer = OptimizerOf(parameter, "w");
    // Zeros where there is no gradient need as much.
    if (rank == 0) parameter.mutable_grad() = torch::ones({1}).expand(huge);
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); });
    EXPECT_THAT(text, AllOf(HasSubstr("gradient/w"), HasSubstr("out of memory: ")));
  });
}

TEST(OptimizerRefusalTest, ATypeThatHasNoReduction) {
  RunTorchRanks(2, [](int rank) {
    const auto options = torch::TensorOptions(torch::kFloat8_e4m3fn);
    auto parameter = torch::empty({4}, options).requires_grad_();
    auto optimizer = OptimizerOf(parameter, "w");
    optimizer.step();  // nobody has a gradient
    if (rank == 0) parameter.mutable_grad() = torch::empty({4}, options);
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] { optimizer.step(); });
    EXPECT_THAT(text, AllOf(HasSubstr("gradient/w"), HasSubstr("has no reduction at all")));
  });
}

TEST(OptimizerRefusalTest, ANameThatIsTooLong) {
  RunTorchRanks(2, [](int) {
    auto parameter = torch::ones({2}).requires_grad_();
    const auto text = ErrorOf(ErrorCode::InvalidArgument,
                              [&] { OptimizerOf(parameter, std::string(4090, 'n')); });
    EXPECT_THAT(text, AllOf(HasSubstr("4090 bytes"), HasSubstr("at most 4087")));
  });
}

}  // namespace
}  // namespace sirtaki::tests
