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
  const std::string part(600'000, 'x');
  EXPECT_EQ(lines.Append(part, "> "), "");
  EXPECT_EQ(lines.Append(part, "> "), "> " + part + part + "\n");
  for (const std::string character : {"\u00e9", "\u20ac", "\U0001f600"}) {
    EXPECT_EQ(lines.Append(part, "> "), "");
    EXPECT_EQ(lines.Append(part + character.substr(0, 1), "> "), "> " + part + part + "\n");
    EXPECT_EQ(lines.Append(character.substr(1) + "\n", "> "), "> " + character + "\n");
    EXPECT_EQ(lines.Append(part, "> "), "");
    EXPECT_EQ(lines.Append(part + character, "> "), "> " + part + part + character + "\n");
  }
}

TEST(RankLinesTest, ALineMayBeLongAndComeByteForByte) {
  LinePrefixer lines;
  std::string all;
  for (int i = 0; i < 100'000; ++i) {
    ASSERT_EQ(lines.Append(i % 2 == 0 ? "a" : "b", "> "), "");
    all += i % 2 == 0 ? "a" : "b";
  }
  EXPECT_EQ(lines.Append("\r", "> "), "");
  EXPECT_EQ(lines.Append("\nnext", "> "), "> " + all + "\r\n");
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

TEST(RankLinesTest, BacktracesPushNothingOut) {
  LastLines last;
  last.Append(
      "terminate called after throwing an instance of 'c10::Error'\n"
      "  what():  no such sample\n"
      "Exception raised from Read at data.cc:12 (most recent call first):\n");
  for (int i = 0; i < 30; ++i) {
    last.Append("frame #" + std::to_string(i) + ": main + 0x12 (0x55 in ./train)\n");
  }
  last.Append(
      "\n[a-1:4711] *** Process received signal ***\n[a-1:4711] Signal: Aborted (6)\n"
      "[a-1:4711] Signal code:  (-6)\n[a-1:4711] Failing at address: (nil)\n");
  for (int i = 0; i < 30; ++i) {
    last.Append("[a-1:4711] [" + std::string(i < 10 ? " " : "") + std::to_string(i) +
                "] ./train(+0x12)[0x55]\n");
  }
  last.Append("[a-1:4711] *** End of error message ***");
  EXPECT_EQ(Joined(last),
            "terminate called after throwing an instance of 'c10::Error'|  what():  no such "
            "sample|");
}

TEST(RankLinesTest, WordsOfOpenMpiAboutAFailedCallStay) {
  LastLines last;
  last.Append("[a:4711] *** An error occurred in MPI_Send\n[1] [ 2] x\n[a:4711] [rank 1] x\n");
  EXPECT_EQ(Joined(last),
            "[a:4711] *** An error occurred in MPI_Send|[1] [ 2] x|[a:4711] [rank 1] x|");
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
