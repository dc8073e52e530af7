#include "core/base/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace sirtaki::core {
namespace {

using ::testing::ElementsAre;

TEST(EnvironmentTest, SeesTheProcessesVariables) {
  ASSERT_EQ(setenv("SIRTAKI_TEST_ENVIRONMENT", "a=b", 1), 0);
  EXPECT_EQ(EnvironmentView::OfProcess().Find("SIRTAKI_TEST_ENVIRONMENT"), "a=b");
  ASSERT_EQ(unsetenv("SIRTAKI_TEST_ENVIRONMENT"), 0);
  EXPECT_EQ(EnvironmentView::OfProcess().Find("SIRTAKI_TEST_ENVIRONMENT"), std::nullopt);
}

TEST(EnvironmentTest, AVariableSetToNothingCountsAsNotSet) {
  const EnvironmentView env = {{"EMPTY", ""}, {"EMPTY_NOT", "x"}};
  EXPECT_EQ(env.Find("EMPTY"), std::nullopt);
  EXPECT_THAT(env.NamesWithPrefix("EMPTY"), ElementsAre("EMPTY_NOT"));
  EXPECT_EQ(env.FindEvenEmpty("EMPTY"), "");
  EXPECT_EQ(env.FindEvenEmpty("NONE"), std::nullopt);
}

TEST(EnvironmentTest, FindsNamesByPrefix) {
  EnvironmentView env = {{"A_1", "x"}, {"B_1", "x"}, {"B_2", "x"}, {"C", "x"}};
  env.Set("B_3", "y");
  EXPECT_THAT(env.NamesWithPrefix("B_"), ElementsAre("B_1", "B_2", "B_3"));
  EXPECT_EQ(env.Find("B_3"), "y");
}

}  // namespace
}  // namespace sirtaki::core
