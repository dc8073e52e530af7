#include "core/base/text.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

namespace sirtaki::core {
namespace {

using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::nanoseconds;
using std::chrono::seconds;

TEST(DurationTextTest, TakesTheUnitThatAReaderWants) {
  EXPECT_EQ(DurationText(seconds(0)), "0 s");
  EXPECT_EQ(DurationText(microseconds(250)), "250 us");
  EXPECT_EQ(DurationText(milliseconds(1)), "1 ms");
  EXPECT_EQ(DurationText(milliseconds(500)), "500 ms");
  EXPECT_EQ(DurationText(milliseconds(1500)), "1.5 s");
  EXPECT_EQ(DurationText(seconds(60)), "60 s");
  EXPECT_EQ(DurationText(seconds(90)), "90 s");
  EXPECT_EQ(DurationText(minutes(2)), "2 min");
  EXPECT_EQ(DurationText(seconds(150)), "2.5 min");
  EXPECT_EQ(DurationText(minutes(30)), "30 min");
  EXPECT_EQ(DurationText(minutes(150)), "2.5 h");
  EXPECT_EQ(DurationText(hours(24 * 365)), "8760 h");
}

TEST(DurationTextTest, RoundsWhatWasMeasured) {
  EXPECT_EQ(DurationText(nanoseconds(499'999'000)), "500 ms");
  EXPECT_EQ(DurationText(microseconds(999'700)), "1 s");
  EXPECT_EQ(DurationText(milliseconds(10'004)), "10 s");
  EXPECT_EQ(DurationText(milliseconds(1'234)), "1.23 s");
  EXPECT_EQ(DurationText(milliseconds(61'004)), "61 s");
  EXPECT_EQ(DurationText(milliseconds(119'960)), "2 min");
  EXPECT_EQ(DurationText(milliseconds(1'800'450)), "30 min");
  EXPECT_EQ(DurationText(seconds(125)), "2.1 min");
  EXPECT_EQ(DurationText(nanoseconds(1)), "0 us");
}

TEST(DurationTextTest, SaysWhatIsNegative) { EXPECT_EQ(DurationText(milliseconds(-5)), "-5 ms"); }

TEST(EscapedTest, LeavesWhatCanBeReadAsItIs) {
  EXPECT_EQ(Escaped(""), "");
  EXPECT_EQ(Escaped("layer1.weight \"\\\" ~"), "layer1.weight \"\\\" ~");
  EXPECT_EQ(Escaped("größe 层 😀"), "größe 层 😀");
}

TEST(EscapedTest, ShowsControlCharacters) {
  EXPECT_EQ(Escaped("a\nb\tc\rd"), "a\\nb\\tc\\rd");
  EXPECT_EQ(Escaped("\x07\x1b[31m\x7f"), "\\x07\\x1b[31m\\x7f");
  EXPECT_EQ(Escaped(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(Escaped("\xc2\x9b"), "\\xc2\\x9b");  // the one-character CSI
}

TEST(EscapedTest, ShowsWhatIsNoUtf8) {
  EXPECT_EQ(Escaped("a\xff"
                    "b"),
            "a\\xffb");
  EXPECT_EQ(Escaped("\x80"), "\\x80");
  EXPECT_EQ(Escaped("\xc3"), "\\xc3");                             // cut off
  EXPECT_EQ(Escaped("\xe5\xb1x"), "\\xe5\\xb1x");                  // cut off in the middle
  EXPECT_EQ(Escaped("\xc0\xaf"), "\\xc0\\xaf");                    // overlong
  EXPECT_EQ(Escaped("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(Escaped("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // above U+10FFFF
}

TEST(QuotedTest, EscapesItsOwnQuotes) {
  EXPECT_EQ(Quoted("w"), "\"w\"");
  EXPECT_EQ(Quoted("say \"hi\"\\n"), "\"say \\\"hi\\\"\\\\n\"");
  EXPECT_EQ(Quoted("a\nb\xff"), "\"a\\nb\\xff\"");
}

TEST(QuotedTest, ShortensLongNamesAndSaysHowLongTheyAre) {
  const std::string longest(128, 'a');
  EXPECT_EQ(Quoted(longest), "\"" + longest + "\"");
  const std::string name = std::string(2000, 'a') + std::string(2000, 'b');
  EXPECT_EQ(Quoted(name),
            "\"" + std::string(80, 'a') + "..." + std::string(40, 'b') + "\" (4000 bytes)");
}

TEST(QuotedTest, DoesNotCutACharacter) {
  std::string name;
  while (name.size() < 600) name += "层";
  // 26 whole characters fit into 80 bytes, 13 into 40.
  std::string expected = "\"";
  for (int i = 0; i < 26; ++i) expected += "层";
  expected += "...";
  for (int i = 0; i < 13; ++i) expected += "层";
  EXPECT_EQ(Quoted(name), expected + "\" (600 bytes)");
}

TEST(QuotedTest, ShortensWhatIsNoUtf8Too) {
  const std::string text = Quoted(std::string(200, '\x80'));
  EXPECT_NE(text.find("\\x80...\\x80"), std::string::npos) << text;
  EXPECT_NE(text.find("(200 bytes)"), std::string::npos) << text;
}

}  // namespace
}  // namespace sirtaki::core
