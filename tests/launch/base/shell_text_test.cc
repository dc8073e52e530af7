#include "launch/base/shell_text.h"

#include <gtest/gtest.h>

namespace sirtaki::launch {
namespace {

using Texts = std::vector<std::string>;

TEST(ShellTextTest, ReadsWordsAsAShell) {
  EXPECT_EQ(ShellWords("  a  'b c'\t\"d e\"f g\\ h "), (Texts{"a", "b c", "d ef", "g h"}));
  EXPECT_EQ(ShellWords("'' \"\""), (Texts{"", ""}));
  EXPECT_EQ(ShellWords("'a\\b' \"c\\\"d\""), (Texts{"a\\b", "c\"d"}));
  EXPECT_EQ(ShellWords(""), Texts{});
}

TEST(ShellTextTest, AnOpenQuoteIsNoText) {
  EXPECT_EQ(ShellWords("a 'b"), std::nullopt);
  EXPECT_EQ(ShellWords("\"a"), std::nullopt);
}

TEST(ShellTextTest, WhatIsQuotedReadsBack) {
  for (const char* word : {"plain", "", "two words", "it's", "$HOME", "a\"b", "-x", "a;b", "ü"}) {
    EXPECT_EQ(ShellWords(ShellQuoted(word)), Texts{word}) << ShellQuoted(word);
  }
  EXPECT_EQ(ShellQuoted("a:4,b:4"), "a:4,b:4");
  EXPECT_EQ(ShellQuoted("$HOME"), "'$HOME'");
}

}  // namespace
}  // namespace sirtaki::launch
