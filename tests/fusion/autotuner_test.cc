#include "fusion/autotuner.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/support/test_scale.h"

namespace sirtaki::fusion {
namespace {

using Values = std::vector<std::int64_t>;

const Values kSizes = {1, 2, 4, 8, 16, 32, 64, 128};

// Steps that take as long as `time` says, until the tuner has finished; how many there were.
int Train(Autotuner& tuner, const std::function<double(const Values&)>& time) {
  int steps = 0;
  while (!tuner.finished() && steps < 100000) {
    tuner.AddStep(time(tuner.values()));
    ++steps;
  }
  return steps;
}

// A valley with its bottom at `best`.
double Valley(std::int64_t value, std::int64_t best) {
  const double away = std::log2(static_cast<double>(value)) - std::log2(static_cast<double>(best));
  return 0.1 * away * away;
}

TEST(AutotunerTest, FindsTheBottomOfEachValley) {
  for (const std::int64_t first : kSizes) {
    for (const std::int64_t second : {1, 16, 128}) {
      Autotuner tuner({{"a", kSizes, 4}, {"b", kSizes, 0}}, {.max_trials = 100});
      Train(tuner, [&](const Values& values) {
        return 1.0 + Valley(values[0], first) + Valley(values[1], second);
      });
      EXPECT_EQ(tuner.values(), (Values{first, second}));
    }
  }
}

TEST(AutotunerTest, FindsItThroughNoiseThatDrifts) {
  std::mt19937_64 random(tests::TestSeed());
  std::uniform_real_distribution<double> noise(0.97, 1.03);
  int found = 0;
  for (int run = 0; run < 20; ++run) {
    Autotuner tuner({{"a", kSizes, 6}}, {});
    int step = 0;
    Train(tuner, [&](const Values& values) {
      // Twice as slow in the end as at the beginning.
      const double drift = 1.0 + std::min(step++, 500) / 500.0;
      return (1.0 + Valley(values[0], 8)) * drift * noise(random);
    });
    found += tuner.values() == Values{8};
  }
  EXPECT_GE(found, 18);
}

TEST(AutotunerTest, TheGainIsThatOfTheTrialsWhateverElseSlowsTheMachine) {
  for (const double later : {1.0, 3.0}) {  // from the second trial on
    Autotuner tuner({{"a", kSizes, 5}}, {});
    EXPECT_EQ(tuner.first_seconds(), 0);
    Train(tuner, [&](const Values& values) {
      const double time = values[0] == 8 ? 0.5 : values[0] == 16 ? 0.75 : 1.0;
      return time * (tuner.trials().empty() ? 1.0 : later);
    });
    EXPECT_EQ(tuner.values(), Values{8});
    EXPECT_DOUBLE_EQ(tuner.first_seconds(), 1.0);
    EXPECT_DOUBLE_EQ(tuner.standing_seconds(), 0.5);
  }
}

TEST(AutotunerTest, ASearchEndsAfterItsMostSteps) {
  Values many;
  for (std::int64_t value = 1; value <= 100; ++value) many.push_back(value);
  const AutotunerOptions how;
  Autotuner tuner({{"a", many, 0}}, how);
  const auto larger_is_better = [](const Values& values) {
    return std::pow(0.9, static_cast<double>(values[0]));
  };
  EXPECT_EQ(Train(tuner, larger_is_better), 965);
  EXPECT_EQ(how.most_steps(), 965) << "docs/configuration.md says one more: the first is not timed";
}

TEST(AutotunerTest, StaysWhereNothingIsBetter) {
  Autotuner tuner({{"a", kSizes, 3}, {"b", kSizes, 3}}, {});
  Train(tuner, [](const Values&) { return 1.0; });
  EXPECT_EQ(tuner.values(), (Values{8, 8}));
  EXPECT_EQ(tuner.trials().size(), 4U) << "up and down for each, and no more";
  for (const Autotuner::Trial& trial : tuner.trials()) EXPECT_FALSE(trial.accepted);
}

TEST(AutotunerTest, AValueHasToWinByTheMargin) {
  const auto time = [](const Values& values) { return values[0] == 16 ? 0.99 : 1.0; };
  Autotuner strict({{"a", kSizes, 3}}, {.margin = 0.02});
  Train(strict, time);
  EXPECT_EQ(strict.values(), Values{8});
  Autotuner lax({{"a", kSizes, 3}}, {.margin = 0.001});
  Train(lax, time);
  EXPECT_EQ(lax.values(), Values{16});
}

TEST(AutotunerTest, TheFirstStepsAndThoseAfterAChangeDoNotCount) {
  const AutotunerOptions how{.warmup_steps = 3, .settle_steps = 2, .steps = 1, .turns = 1};
  Autotuner tuner({{"a", {1, 2}, 0}}, how);
  for (int i = 0; i < 5; ++i) tuner.AddStep(100.0);
  EXPECT_EQ(tuner.values(), Values{1});
  tuner.AddStep(1.0);
  EXPECT_EQ(tuner.values(), Values{2}) << "the old value is measured, now the new one";
  for (int i = 0; i < 2; ++i) tuner.AddStep(100.0);
  tuner.AddStep(0.5);
  ASSERT_EQ(tuner.trials().size(), 1U);
  EXPECT_EQ(tuner.trials()[0].from_seconds, 1.0);
  EXPECT_EQ(tuner.trials()[0].to_seconds, 0.5);
  EXPECT_EQ(tuner.values(), Values{2});
}

TEST(AutotunerTest, EndsAfterSoManyTrials) {
  Autotuner tuner({{"a", kSizes, 0}}, {.max_trials = 3});
  Train(tuner, [](const Values& values) { return 1.0 / static_cast<double>(values[0]); });
  EXPECT_EQ(tuner.trials().size(), 3U);
  EXPECT_EQ(tuner.values(), Values{8});
  tuner.AddStep(1.0);
  EXPECT_EQ(tuner.values(), Values{8});
  EXPECT_EQ(tuner.trials().size(), 3U);
}

TEST(AutotunerTest, OptionsWithOneValueAreLeftAlone) {
  Autotuner tuner({{"a", {5}, 0}, {"b", kSizes, 0}, {"c", {7}, 0}}, {});
  Train(tuner, [](const Values& values) { return 1.0 + Valley(values[1], 4); });
  EXPECT_EQ(tuner.values(), (Values{5, 4, 7}));
  Autotuner nothing({{"a", {5}, 0}}, {});
  EXPECT_TRUE(nothing.finished());
}

TEST(AutotunerTest, TellsWhatItHasTried) {
  Autotuner tuner({{"a", {1, 2}, 0}},
                  {.warmup_steps = 0, .settle_steps = 0, .steps = 1, .turns = 1});
  tuner.AddStep(0.002);
  tuner.AddStep(0.001);
  EXPECT_EQ(tuner.Csv(),
            "option,from,to,from_ms,to_ms,accepted\n"
            "a,1,2,2.0000,1.0000,yes\n");
}

}  // namespace
}  // namespace sirtaki::fusion
