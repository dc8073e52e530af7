#include "core/base/words.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace sirtaki::core {
namespace {

using Pieces = std::vector<std::string_view>;

TEST(WordsTest, PiecesBetweenSeparatorsStayAsTheyAre) {
  EXPECT_EQ(Split("a,, b ,c", ','), (Pieces{"a", "", " b ", "c"}));
  EXPECT_EQ(Split("a,", ','), (Pieces{"a", ""}));
  EXPECT_EQ(Split("", ','), Pieces{});
}

TEST(WordsTest, WordsAreNotEmpty) {
  EXPECT_EQ(Words("  a \tbc\r"), (Pieces{"a", "bc"}));
  EXPECT_EQ(Words(" \t"), Pieces{});
}

TEST(WordsTest, TextsAndNumbersAreJoined) {
  EXPECT_EQ(Joined(std::vector<std::string>{"", "b", ""}, "-"), "-b-");
  EXPECT_EQ(Joined(std::set<int>{10, 2}, ", "), "2, 10");
  EXPECT_EQ(Joined(std::vector<int>(), ", "), "");
}

TEST(WordsTest, NumbersAreWholeAndInBounds) {
  EXPECT_EQ(NumberFrom<int>("12", 1, 12), 12);
  for (const char* text : {"", "0", "13", "1x", " 1", "1.0", "+1", "99999999999999999999"}) {
    EXPECT_EQ(NumberFrom<int>(text, 1, 12), std::nullopt) << text;
  }
}

TEST(WordsTest, OneIsOneAndOthersAreSeveral) {
  EXPECT_EQ(CountText(1, "rank"), "1 rank");
  EXPECT_EQ(CountText(0U, "rank"), "0 ranks");
  EXPECT_EQ(CountText(12, "more worker"), "12 more workers");
}

}  // namespace
}  // namespace sirtaki::core
