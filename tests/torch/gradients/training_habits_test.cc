// Every optimizer with every habit of training follows one process that sees the joined batch.
#include "tests/torch/gradients/training_habits.h"

#include <gtest/gtest.h>

#include <tuple>
#include <utility>
#include <vector>

#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests::habits {
namespace {

class TrainingHabitsTest : public testing::TestWithParam<std::tuple<Kind, Habit>> {};

TEST_P(TrainingHabitsTest, FollowsOneProcess) {
  const auto [kind, habit] = GetParam();
  using Sharing = session::InprocWorld::Sharing;
  const std::vector<std::pair<int, Sharing>> worlds = {
      {1, Sharing::kNone}, {2, Sharing::kNone}, {3, Sharing::kDirect}, {2, Sharing::kPooled}};
  for (const auto& [ranks, sharing] : worlds) {
    const int size = ranks;
    const Average average = sharing == Sharing::kPooled ? Average::Step : Average::Backward;
    const Parameters expected = TrainInOneProcess(kind, habit, size);
    std::vector<Parameters> of_rank(static_cast<std::size_t>(size));
    RunTorchRanks(
        size,
        [&, kind = kind, habit = habit, average](int rank) {
          of_rank[static_cast<std::size_t>(rank)] =
              TrainAsRank(kind, habit, rank, DistributedOptimizerOptions().average_at(average));
        },
        {}, {}, sharing);
    const HabitNet untrained;
    EXPECT_GT(Distance(expected, untrained.parameters()), 1e-3) << "it learns";
    EXPECT_LT(Distance(of_rank[0], expected), ToleranceOf(kind)) << size << " ranks";
    for (const Parameters& parameters : of_rank) {
      EXPECT_EQ(Distance(parameters, of_rank[0]), 0) << size << " ranks have the same bits";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TrainingHabitsTest, All(), NameOf);

}  // namespace
}  // namespace sirtaki::tests::habits
