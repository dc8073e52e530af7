// RANKS: 2 3
// Every optimizer with every habit of training, by real ranks.
#include <gtest/gtest.h>
#include <sirtaki/torch.h>

#include <tuple>

#include "tests/torch/gradients/training_habits.h"

namespace sirtaki::tests::habits {
namespace {

class TrainingHabitsMpiTest : public testing::TestWithParam<std::tuple<Kind, Habit>> {
 protected:
  static void SetUpTestSuite() { init(); }
  static void TearDownTestSuite() { shutdown(); }
};

TEST_P(TrainingHabitsMpiTest, FollowsOneProcess) {
  const auto [kind, habit] = GetParam();
  const Parameters expected = TrainInOneProcess(kind, habit, size());
  const Parameters trained = TrainAsRank(kind, habit, rank());
  EXPECT_LT(Distance(trained, expected), ToleranceOf(kind));
  NamedTensors named;
  for (const auto& parameter : trained) {
    named.emplace_back("parameter " + std::to_string(named.size()), parameter);
  }
  check_parameters(named);
}

INSTANTIATE_TEST_SUITE_P(All, TrainingHabitsMpiTest, All(), NameOf);

}  // namespace
}  // namespace sirtaki::tests::habits
