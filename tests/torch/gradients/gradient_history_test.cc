#include "frameworks/torch/gradients/gradient_history.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>
#include <vector>

namespace sirtaki::detail {
namespace {

TEST(GradientHistoryTest, APassAddsToAnAverageUntilTheProgramHasChangedIt) {
  GradientHistory history;
  torch::Tensor gradient;
  EXPECT_FALSE(history.BeginPass(gradient, /*later=*/false));
  EXPECT_TRUE(history.fresh());
  gradient = torch::ones({2});
  history.EndPass(gradient);
  EXPECT_FALSE(history.BeginPass(gradient, false)) << "it is a sum of passes";
  EXPECT_FALSE(history.fresh());
  history.NoteAverage(gradient);
  EXPECT_TRUE(history.BeginPass(gradient, false));
  gradient.add_(1);
  history.EndPass(gradient);
  EXPECT_TRUE(history.BeginPass(gradient, false)) << "with something added";
  history.EndPass(gradient);
  gradient.zero_();
  EXPECT_FALSE(history.BeginPass(gradient, false));
  history.NoteAverage(gradient);
  gradient.mul_(2);
  EXPECT_TRUE(history.BeginPass(gradient, false, /*also_changed=*/true));
  history.ForgetAverage();
  EXPECT_FALSE(history.BeginPass(gradient, false, /*also_changed=*/true));
  EXPECT_TRUE(history.BeginPass(gradient, /*later=*/true)) << "as the step says";
  EXPECT_FALSE(history.BeginPass(torch::ones({2}), false)) << "another tensor";
  EXPECT_FALSE(history.BeginPass(torch::Tensor(), /*later=*/true));
}

TEST(GradientHistoryTest, WhenNoPassIsToComeAnAverageMayStandThere) {
  GradientHistory history;
  const torch::Tensor gradient = torch::ones({2});
  EXPECT_FALSE(history.EndPasses(torch::Tensor(), /*touched=*/false, /*averaged=*/true));
  EXPECT_FALSE(history.EndPasses(gradient, false, /*averaged=*/false));
  EXPECT_TRUE(history.EndPasses(gradient, false, /*averaged=*/true));
  history.NoteAverage(gradient);
  EXPECT_TRUE(history.EndPasses(gradient, false, false));
  EXPECT_TRUE(history.EndPasses(gradient, /*touched=*/true, false)) << "that the passes added to";
  history.NoteAverage(torch::Tensor());
  EXPECT_FALSE(history.EndPasses(gradient, true, false));
}

// Hooks of several backward() at once, which note different averages.
TEST(GradientHistoryTest, ThreadsMayNoteAndAskAtOnce) {
  GradientHistory history;
  constexpr int kRounds = 2000;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&history, &wrong] {
      const torch::Tensor mine = torch::ones({2});
      const torch::Tensor never = torch::ones({2});
      for (int round = 0; round < kRounds; ++round) {
        history.NoteAverage(mine);
        wrong += history.BeginPass(never, false);
        (void)history.BeginPass(mine, false);
        history.EndPass(mine);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace sirtaki::detail
