#include "launch/job/rank_lines.h"

#include <gtest/gtest.h>

namespace sirtaki::launch {
namespace {

std::string Joined(const LastLines& last) {
  std::string text;
  for (const std::string& line : last.Lines()) text += line + "|";
  return text;
}

TEST(RankLinesTest, EachWholeLineHasThePrefix) {
  LinePrefixer lines;
  EXPECT_EQ(lines.Append("a\nb", "> "), "> a\n");
  EXPECT_EQ(lines.Append("c\n\nd\n", "> "), "> bc\n> \n> d\n");
  EXPECT_EQ(lines.Finish("> "), "");
}

TEST(RankLinesTest, TheRestIsALineAtTheEnd) {
  LinePrefixer lines;
  EXPECT_EQ(lines.Append("no newline", "> "), "");
  EXPECT_EQ(lines.Finish("> "), "> no newline\n");
  EXPECT_EQ(lines.Finish("> "), "");
}

TEST(RankLinesTest, ProgressBarsComeAsTheyAreDrawn) {
  LinePrefixer lines;
  EXPECT_EQ(lines.Append("10%\r20%\r", "> "), "> 10%\r");
  EXPECT_EQ(lines.Append("30%\r\nnext\r", "> "), "> 20%\r> 30%\r\n");
  EXPECT_EQ(lines.Append("\n", "> "), "> next\r\n");
}

TEST(RankLinesTest, AnEndlessLineComesInPieces) {
  LinePrefixer lines;
  const std::string part(40000, 'x');
  EXPECT_EQ(lines.Append(part, "> "), "");
  EXPECT_EQ(lines.Append(part, "> "), "> " + part + part + "\n");
}

TEST(RankLinesTest, KeepsTheLastLinesOnly) {
  LastLines last;
  for (int i = 0; i < 100; ++i) last.Append("line " + std::to_string(i) + "\n");
  EXPECT_EQ(last.Lines().size(), 20U);
  EXPECT_EQ(last.Lines().front(), "line 80");
  EXPECT_EQ(last.Lines().back(), "line 99");
}

TEST(RankLinesTest, LinesMayComeInPieces) {
  LastLines last;
  last.Append("a");
  last.Append("b\nc");
  last.Append("\n\n");
  last.Append("d");
  EXPECT_EQ(Joined(last), "ab|c||d|");
}

TEST(RankLinesTest, LongAndHostileLinesAreTamed) {
  LastLines last;
  last.Append(std::string(400, 'x'));
  last.Append(std::string(400, 'x') + "\n\x1b[31mred");
  EXPECT_EQ(last.Lines().front().size(), 500U);
  EXPECT_EQ(last.Lines().back(), "\\x1b[31mred");
}

}  // namespace
}  // namespace sirtaki::launch
