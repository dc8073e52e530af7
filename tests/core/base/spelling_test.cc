#include "core/base/spelling.h"

#include <gtest/gtest.h>

namespace sirtaki::core {
namespace {

TEST(SpellingTest, FindsTheWordThatWasMeant) {
  const std::vector<std::string> known = {"--hosts", "--hostfile", "--include"};
  EXPECT_EQ(NearestWord("--hostflie", known), "--hostfile");
  EXPECT_EQ(NearestWord("--host", known), "--hosts");
  EXPECT_EQ(NearestWord("--inclde", known), "--include");
}

TEST(SpellingTest, AFarWordWasNotMeant) {
  EXPECT_EQ(NearestWord("--zzzzzz", {"--hosts", "--include"}), "");
  EXPECT_EQ(NearestWord("x", {}), "");
}

TEST(SpellingTest, ThePrefixThatAllHaveDoesNotMakeThemNear) {
  const std::vector<std::string> known = {"SIRTAKI_WAIT"};
  EXPECT_EQ(NearestWord("SIRTAKI_PATH", known, 0), "SIRTAKI_WAIT");
  EXPECT_EQ(NearestWord("SIRTAKI_POOL", known, 8), "");
}

}  // namespace
}  // namespace sirtaki::core
