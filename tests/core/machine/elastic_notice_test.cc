#include "core/machine/elastic_notice.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/machine/start_notice.h"

namespace sirtaki::core {
namespace {

using Kind = ElasticNotice::Kind;

TEST(ElasticNoticeTest, ANoticeComesBackAsItWas) {
  const ElasticNotice notice{Kind::kPlace, 7, 3, 8, 51234, "10.0.0.1", {1, 200'000}};
  EXPECT_EQ(DecodeElasticNotice(Encode(notice)), notice);
}

TEST(ElasticNoticeTest, NoBytesAreTakenForANoticeThatAreNone) {
  const std::string bytes = Encode({Kind::kAsks, 7, 0, 0, 0, "why", {1, 2}});
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(DecodeElasticNotice(std::string_view(bytes).substr(0, length))) << length;
  }
  EXPECT_FALSE(DecodeElasticNotice(bytes + "x"));
  EXPECT_FALSE(DecodeElasticNotice("\x7f" + bytes.substr(1)));
}

TEST(ElasticNoticeTest, WhatIsLongIsCutSoThatItFitsIntoADatagram) {
  ElasticNotice notice{Kind::kOver, 1 << 30, 1 << 20, 1 << 20, 65535, std::string(5000, 'x'), {}};
  notice.ranks.assign(5000, 1 << 20);
  const std::string bytes = Encode(notice);
  EXPECT_LE(bytes.size(), kMaxNoticeText);
  const auto cut = DecodeElasticNotice(bytes);
  ASSERT_TRUE(cut);
  EXPECT_EQ(cut->text, std::string(cut->text.size(), 'x'));
  EXPECT_GT(cut->text.size(), 1000U);
  EXPECT_GT(cut->ranks.size(), 100U);
}

}  // namespace
}  // namespace sirtaki::core
