// RANKS: 1 2 3
// Optimizer state, objects and metrics, as a program on mpirun's ranks uses them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/test_scale.h"
#include "tests/torch/training.h"

namespace sirtaki::tests {
namespace {

using ::testing::HasSubstr;

class StateTest : public ::testing::Test {
 protected:
  void SetUp() override { init(); }
  void TearDown() override { shutdown(); }
};

void Train(SmallNet& net, torch::optim::Optimizer& optimizer, int from, int to) {
  for (int n = from; n < to; ++n) {
    optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = Loss(net, BatchOfRank(n, 0));
      loss.backward();
      return loss;
    });
  }
}

template <class MakeOptimizer>
void ExpectGoesOnAsRoot(const MakeOptimizer& make) {
  SmallNet lone;
  auto alone = make(lone.parameters());
  Train(lone, alone, 0, 8);
  SmallNet net;
  auto optimizer = make(net.parameters());
  const int root = size() - 1;
  if (rank() == root) Train(net, optimizer, 0, 3);
  if (rank() != root && rank() == 0) Train(net, optimizer, 20, 21);  // state that must go
  broadcast_parameters(net, root);
  broadcast_optimizer_state(optimizer, root);
  Train(net, optimizer, 3, 8);
  EXPECT_EQ(Distance(net.parameters(), lone.parameters()), 0);
}

TEST_F(StateTest, OptimizersGoOnAsTheRoot) {
  using namespace torch::optim;
  using List = std::vector<torch::Tensor>;
  ExpectGoesOnAsRoot([](const List& p) { return SGD(p, SGDOptions(0.1).momentum(0.9)); });
  ExpectGoesOnAsRoot([](const List& p) { return Adam(p, AdamOptions(0.1)); });
  ExpectGoesOnAsRoot([](const List& p) { return AdamW(p, AdamWOptions(0.1).amsgrad(true)); });
  ExpectGoesOnAsRoot([](const List& p) { return RMSprop(p, RMSpropOptions(0.01)); });
  ExpectGoesOnAsRoot([](const List& p) { return Adagrad(p, AdagradOptions(0.1)); });
  ExpectGoesOnAsRoot([](const List& p) { return LBFGS(p, LBFGSOptions(0.1).max_iter(4)); });
}

TEST_F(StateTest, LargeStateArrives) {
  auto weight = torch::zeros({5'000'001}, torch::requires_grad());
  weight.mutable_grad() = torch::full({5'000'001}, 1.0f + static_cast<float>(rank()));
  torch::optim::SGD sgd({weight}, torch::optim::SGDOptions(0.1).momentum(0.9));
  sgd.step();
  broadcast_optimizer_state(sgd, size() - 1);
  const auto& state = *sgd.state().at(weight.unsafeGetTensorImpl());
  const auto& buffer = static_cast<const torch::optim::SGDParamState&>(state).momentum_buffer();
  EXPECT_TRUE(buffer.eq(size()).all().item<bool>());
}

TEST_F(StateTest, ObjectsArrive) {
  const std::string mine(static_cast<std::size_t>(rank() * 1000), static_cast<char>('a' + rank()));
  const int last = size() - 1;
  const std::string of_last(static_cast<std::size_t>(last * 1000), static_cast<char>('a' + last));
  EXPECT_EQ(broadcast_object(mine, last), of_last);
  EXPECT_EQ(allgather_object(mine, "name").back(), of_last);
  EXPECT_EQ(broadcast_object(rank() == last ? torch::arange(5'000'000) : torch::Tensor(), last)[-1]
                .item<std::int64_t>(),
            4'999'999);
  const auto values = allgather_object(c10::IValue(rank()));
  ASSERT_EQ(values.size(), static_cast<std::size_t>(size()));
  for (int r = 0; r < size(); ++r) EXPECT_EQ(values[static_cast<std::size_t>(r)].toInt(), r);
}

TEST_F(StateTest, ErrorsOfOneRankAreThrownOnAll) {
  const int last = size() - 1;
  try {
    allgather_object(rank() == last ? torch::Tensor() : torch::ones({1}));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("on rank " + std::to_string(last)));
  }
  try {
    metric_average(1.0, rank() == last ? -2 : 1, "loss");
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("the weight is -2"));
  }
}

TEST_F(StateTest, MetricsAreAveraged) {
  EXPECT_DOUBLE_EQ(metric_average(rank()), (size() - 1) / 2.0);
  EXPECT_DOUBLE_EQ(metric_average(rank() == 0 ? 6 : 0, rank() == 0 ? 1 : 2, "accuracy"),
                   6.0 / (2 * size() - 1));
  EXPECT_TRUE(torch::equal(metric_average(torch::full({3}, 1.0 * rank())),
                           torch::full({3}, (size() - 1) / 2.0, torch::kDouble)));
}

// Needs 10 GB of memory.
TEST_F(StateTest, ObjectsOfMoreThanTwoGigabytes) {
  if (size() != 2 || tests::ScaledCount(1, 2) < 2) {
    GTEST_SKIP() << "2 ranks move 2^31 bytes: set SIRTAKI_TEST_SCALE=full";
  }
  constexpr std::size_t kHuge = (std::size_t{1} << 31) + 5;
  {
    std::string mine;
    if (rank() == 1) {
      mine.assign(kHuge, 'x');
      mine[kHuge - 2] = 'y';
    }
    const std::string got = broadcast_object(mine, 1);
    ASSERT_EQ(got.size(), kHuge);
    EXPECT_EQ(got.substr(kHuge - 3), "xyx");
    EXPECT_EQ(got.find_first_not_of('x'), kHuge - 2);
  }
  torch::Tensor mine;
  if (rank() == 0) {
    mine = torch::ones({static_cast<std::int64_t>(kHuge)}, torch::kByte);
    mine[-2] = 2;
  }
  const auto got = broadcast_object(mine, 0);
  ASSERT_EQ(got.numel(), static_cast<std::int64_t>(kHuge));
  // LibTorch's sum would make an int64 of every byte first: 17 GB on each rank.
  const auto* bytes = got.const_data_ptr<std::uint8_t>();
  EXPECT_EQ(std::count(bytes, bytes + kHuge, 1), static_cast<std::ptrdiff_t>(kHuge) - 1);
  EXPECT_EQ(bytes[kHuge - 2], 2);
}

}  // namespace
}  // namespace sirtaki::tests
