// RANKS: 1 2 3
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <string>

#include "tests/torch/batch_norm/norm_net.h"

namespace sirtaki::tests {
namespace {

class SyncBatchNormTest : public testing::Test {
 protected:
  void TearDown() override { shutdown(); }
};

// The net is made before init(), and used again after a new one.
TEST_F(SyncBatchNormTest, AConvertedNetTrainsAsOnTheJoinedBatch) {
  constexpr int kSteps = 5;
  auto net = MakeNormNet(torch::nn::BatchNorm2d(4), torch::nn::BatchNorm2d(3));
  EXPECT_EQ(convert_sync_batchnorm(*net), 2);
  torch::optim::SGD base(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  init();
  const auto expected = TrainNormNetAlone(kSteps, size());
  {
    auto optimizer = DistributedOptimizer(std::move(base), net->named_parameters());
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      NormLoss(net, ImagesOfRank(step, rank())).backward();
      optimizer.step();
    }
  }
  check_parameters(*net);
  auto all = net->parameters();
  for (const auto& buffer : net->buffers()) all.push_back(buffer.to(torch::kDouble));
  EXPECT_LT(Distance(all, expected), 1e-11);

  shutdown();
  init();
  NormLoss(net, ImagesOfRank(kSteps, rank())).backward();
  check_parameters(*net);  // the running statistics have followed
}

TEST_F(SyncBatchNormTest, CheckParametersNamesADifference) {
  init();
  if (size() == 1) GTEST_SKIP() << "one rank has nobody to differ from";
  auto net = MakeNormNet(torch::nn::BatchNorm2d(4), torch::nn::BatchNorm2d(3));
  check_parameters(*net);
  if (rank() == 1) {
    torch::NoGradGuard no_grad;
    net->parameters()[2][1] += 1e-9;
  }
  try {
    check_parameters(*net);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Mismatch);
    const std::string text = error.what();
    EXPECT_NE(text.find("\"1.weight\" float64 [4] differs"), std::string::npos) << text;
    EXPECT_NE(text.find("the first different element, [1], is "), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace sirtaki::tests
