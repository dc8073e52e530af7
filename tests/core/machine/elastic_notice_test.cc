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

TEST(ElasticNoticeTest, ATextThatIsLongIsCutSoThatItFitsIntoADatagram) {
  const ElasticNotice notice{Kind::kOver, 1 << 30, 1 << 20, 1 << 20, 65535, std::string(5000, 'x'),
                             {}};
  const std::string bytes = Encode(notice);
  EXPECT_LE(bytes.size(), kMaxNoticeText);
  const auto cut = DecodeElasticNotice(bytes);
  ASSERT_TRUE(cut);
  EXPECT_EQ(cut->text, std::string(cut->text.size(), 'x'));
  EXPECT_GT(cut->text.size(), 1000U);
}

TEST(ElasticNoticeTest, AllRanksThatLeaveAreTold) {
  ElasticNotice notice{Kind::kChange, 7, 0, 0, 0, "why", RankRanges::Span(256, 511)};
  EXPECT_EQ(DecodeElasticNotice(Encode(notice)), notice);
  notice.ranks = RankRanges::Span(0, 1 << 20);
  EXPECT_EQ(DecodeElasticNotice(Encode(notice)), notice);
}

// The gaps and the ranges are as long as that many can be.
TEST(ElasticNoticeTest, AsManyRangesAsMayBeFitIntoADatagramWithSomeText) {
  for (const int length : {1, 2, 200, 1300}) {
    ElasticNotice notice{Kind::kChange, 1 << 30, 1 << 20, 1 << 20, 65535, std::string(5000, 'x')};
    for (std::size_t i = 0; i < kMostRangesOfNotice; ++i) {
      const int first = static_cast<int>(i) * 2600 + 1300;
      notice.ranks.Add(RankRanges::Span(first, first + length - 1));
    }
    const std::string bytes = Encode(notice);
    EXPECT_LE(bytes.size(), kMaxNoticeText);
    const auto told = DecodeElasticNotice(bytes);
    ASSERT_TRUE(told);
    EXPECT_EQ(told->ranks, notice.ranks);
    EXPECT_GT(told->text.size(), 200U);
  }
}

TEST(ElasticNoticeTest, ARangeBehindTheLastRankIsNone) {
  std::string bytes = Encode({Kind::kChange, 7, 0, 0, 0, "", {1 << 20}});
  bytes[bytes.size() - 2] = 1;  // one more rank
  EXPECT_FALSE(DecodeElasticNotice(bytes));
}

}  // namespace
}  // namespace sirtaki::core
