#include "core/protocol/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <memory>
#include <random>
#include <span>

#include "core/base/byte_codec.h"
#include "tests/core/protocol/random_messages.h"
#include "tests/support/test_scale.h"

namespace sirtaki::core {
namespace {

using ::testing::HasSubstr;

Bytes FromHex(std::initializer_list<int> values) {
  Bytes bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

Status DecodeOnly(const Bytes& bytes) {
  Message message;
  return Decode(bytes, &message);
}

Message DecodedOrDie(const Bytes& bytes) {
  Message message;
  const Status status = Decode(bytes, &message);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return message;
}

// The bytes that the grammar gives, by hand: other versions of the library must read them.
TEST(WireTest, PingIsSixBytes) {
  const Bytes bytes = FromHex({0x53, 7, 0xac, 0x02, 4, 5});
  EXPECT_EQ(Encode({300, PingMessage{5}}), bytes);
  EXPECT_EQ(Dump(DecodedOrDie(bytes)), Dump({300, PingMessage{5}}));
}

TEST(WireTest, ReportOfAKnownIdIsAFewBytes) {
  ReadyItem item;
  item.id = 9;
  const Message message{1, ReportMessage{2, {item}}};
  //                              session, report, ack, 1 item, ready, set, id, no key, no bits,
  //                              none
  const Bytes bytes = FromHex({0x53, 7, 1, 0, 2, 1, 0, 0, 9, 0, 0, 0});
  EXPECT_EQ(Encode(message), bytes);
  EXPECT_EQ(Dump(DecodedOrDie(bytes)), Dump(message));
}

TEST(WireTest, WholeRunEntryFollowsTheGrammar) {
  auto signature = std::make_shared<Signature>();
  signature->kind = OpKind::kBroadcast;
  signature->dtype = DType::kI64;
  signature->root = 2;
  signature->shape = {300};
  RunEntry run;
  run.key = Key::Named(3, "ab");
  run.signature = signature;
  run.new_id = 4;
  run.absent = {false, true};
  run.silent = RankRanges{1, 2, 5};
  const Message message{0, StreamMessage{7, {Batch{3, 8, {run}}}}};
  const Bytes bytes = FromHex({
      0x53, 7,    0,    1,            // stream of session 0
      7,    1,    3,    8, 1,         // first 7; one batch: set 3, number 8, one entry
      0,    0,    1,    2, 'a', 'b',  // run, no id, named "ab"
      2,    0x02,                     // two bits, the second set
      2,    1,    1,    1, 0,         // two ranges: [1, 2], then from 4 a gap of 1: [5, 5]
      1,    0,    4,    0, 2,   4,    // broadcast, sum, int64, host; a root follows: zigzag 2
      1,    0xac, 0x02,               // one dimension: 300
      4,                              // new id
  });
  EXPECT_EQ(Encode(message), bytes);
  EXPECT_EQ(Dump(DecodedOrDie(bytes)), Dump(message));
}

TEST(WireTest, TheTypeThatATensorTravelsAsIsAField) {
  auto signature = std::make_shared<Signature>();
  signature->wire = DType::kBF16;
  signature->shape = {7};
  RunEntry run;
  run.key = Key::Unnamed(0, 5);
  run.signature = signature;
  const Message message{0, StreamMessage{1, {Batch{0, 1, {run}}}}};
  Bytes bytes = FromHex({
      0x53, 7, 0, 1, 1,  1, 0, 1, 1,  // stream of session 0; one batch of the world, one entry
      0,    0, 2, 5, 0,  0,           // run, no id, unnamed #5, no bits, none silent
      0,    0, 7, 0, 32, 6, 1, 7,     // all-reduce, sum, float32, host; a type follows: bfloat16
      0,                              // no new id
  });
  EXPECT_EQ(Encode(message), bytes);
  EXPECT_EQ(Dump(DecodedOrDie(bytes)), Dump(message));
  bytes[20] = std::byte{kDTypeCount};
  EXPECT_THAT(DecodeOnly(bytes).message(), HasSubstr("wire type"));
}

TEST(WireTest, LimitsAreSixNumbersByName) {
  ReadyItem item;
  item.key = Key::Named(0, "l");
  item.variants = {{Limits{1, 2, 3, 4, 5, 300}, {}, RankRanges{0}}};
  const Message message{1, ReportMessage{2, {item}}};
  Bytes bytes = FromHex({
      0x53, 7, 1, 0, 2,   1, 0,     // report of session 1: ack, one item, which is ready
      0,    0, 1, 1, 'l', 0, 0,     // of the world, no id, named "l"; no bits, none silent
      1,    0, 3, 1, 2,   3, 4, 5,  // one variant: valid, limits
      0xac, 2, 1, 0, 0,   0,        // 300 at their end; of rank 0; no further variants
  });
  EXPECT_EQ(Encode(message), bytes);
  EXPECT_EQ(Dump(DecodedOrDie(bytes)), Dump(message));
  bytes[19] = std::byte{0};
  EXPECT_THAT(DecodeOnly(bytes).message(), HasSubstr("limits at byte"));
}

TEST(WireTest, ARefusalHasAReason) {
  ReadyItem item;
  item.key = Key::Named(0, "w");
  item.variants = {{Refusal{}, "no", RankRanges{0}}};
  const Message message{1, ReportMessage{2, {item}}};
  Bytes bytes = FromHex({
      0x53, 7, 1, 0, 2,   1,   0,           // report of session 1: ack, one item, which is ready
      0,    0, 1, 1, 'w', 0,   0,           // of the world, no id, named "w"; no bits, none silent
      1,    2, 5, 2, 'n', 'o', 1, 0, 0, 0,  // one variant: invalid, a refusal; of rank 0; no more
  });
  EXPECT_EQ(Encode(message), bytes);
  EXPECT_EQ(Dump(DecodedOrDie(bytes)), Dump(message));
  bytes[15] = std::byte{0};
  EXPECT_THAT(DecodeOnly(bytes).message(), HasSubstr("variant reason"));
}

TEST(WireTest, MessagesComeBackAsTheyWere) {
  RandomMessages messages(tests::TestSeed());
  const int count = tests::ScaledCount(5000, 200000);
  for (int i = 0; i < count; ++i) {
    const Message sent = messages.Next();
    Message received;
    const Status status = Decode(Encode(sent), &received);
    ASSERT_TRUE(status.ok()) << status.ToString();
    ASSERT_EQ(Dump(received), Dump(sent));
  }
}

// ---- hostile bytes: no harm, and what is accepted is a message that Encode accepts too ----

class HostileBytesTest : public ::testing::Test {
 protected:
  void Feed(const Bytes& bytes) {
    Message message;
    const Status status = Decode(bytes, &message);
    if (status.ok()) {
      ++accepted_;
      const Bytes again = Encode(message);  // terminates if a bound was missed
      EXPECT_EQ(Dump(DecodedOrDie(again)), Dump(message));
    } else {
      EXPECT_EQ(status.code(), StatusCode::kProtocol);
      EXPECT_FALSE(status.message().empty());
    }
  }
  int accepted_ = 0;
};

TEST_F(HostileBytesTest, RandomBytesDoNoHarm) {
  std::mt19937_64 random(tests::TestSeed());
  const int count = tests::ScaledCount(10000, 100000);
  const std::byte version = Encode(RandomMessages(1).Next())[1];
  for (int i = 0; i < count; ++i) {
    Bytes bytes(random() % 200);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    // Half of them get past the header.
    if (i % 2 == 0 && bytes.size() >= 4) {
      bytes[0] = std::byte{0x53};
      bytes[1] = version;
      bytes[2] = std::byte{1};
      bytes[3] = static_cast<std::byte>(random() % 9);
    }
    Feed(bytes);
  }
}

TEST_F(HostileBytesTest, SmallBytesDoNoHarm) {
  // Values below 4 are plausible tags and counts, so these get deep into the grammar.
  std::mt19937_64 random(tests::TestSeed());
  const int count = tests::ScaledCount(10000, 100000);
  for (int i = 0; i < count; ++i) {
    Bytes bytes = FromHex({0x53, 7, 1, static_cast<int>(random() % 2)});
    for (std::uint64_t j = random() % 60; j > 0; --j) {
      bytes.push_back(static_cast<std::byte>(random() % 4));
    }
    Feed(bytes);
  }
  EXPECT_GT(accepted_, 0);
}

TEST_F(HostileBytesTest, TruncationsAreErrors) {
  RandomMessages messages(tests::TestSeed());
  int left = tests::ScaledCount(10000, 100000);
  while (left > 0) {
    const Bytes whole = Encode(messages.Next());
    for (std::size_t size = 0; size < whole.size() && left > 0;
         size += 1 + messages.Below(3), --left) {
      const Bytes cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
      ASSERT_EQ(DecodeOnly(cut).code(), StatusCode::kProtocol) << "cut to " << size;
    }
  }
}

TEST_F(HostileBytesTest, FlippedBitsDoNoHarm) {
  RandomMessages messages(tests::TestSeed());
  const int count = tests::ScaledCount(10000, 100000);
  for (int i = 0; i < count; ++i) {
    Bytes bytes = Encode(messages.Next());
    for (std::uint64_t flips = 1 + messages.Below(4); flips > 0; --flips) {
      bytes[messages.Below(bytes.size())] ^= std::byte{1} << messages.Below(8);
    }
    Feed(bytes);
  }
}

TEST(WireTest, AFrameOfWhichOneBitIsFlippedOrBytesAreMissingIsAnError) {
  RandomMessages messages(tests::TestSeed());
  for (int i = 0; i < 50; ++i) {
    const Message sent = messages.Next();
    Bytes frame = EncodeFrame(sent);
    Message received;
    ASSERT_TRUE(DecodeFrame(frame, &received).ok());
    ASSERT_EQ(Dump(received), Dump(sent));
    for (std::size_t bit = 0; bit < 8 * frame.size(); ++bit) {
      frame[bit / 8] ^= std::byte{1} << (bit % 8);
      ASSERT_EQ(DecodeFrame(frame, &received).code(), StatusCode::kProtocol) << "bit " << bit;
      frame[bit / 8] ^= std::byte{1} << (bit % 8);
    }
    for (std::size_t size = 0; size < frame.size(); ++size) {
      ASSERT_EQ(DecodeFrame(std::span(frame).first(size), &received).code(), StatusCode::kProtocol)
          << "cut to " << size;
    }
  }
}

TEST_F(HostileBytesTest, ReplacedInsertedAndRemovedBytesDoNoHarm) {
  RandomMessages messages(tests::TestSeed());
  const int count = tests::ScaledCount(10000, 100000);
  for (int i = 0; i < count; ++i) {
    Bytes bytes = Encode(messages.Next());
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(messages.Below(bytes.size()));
    const std::byte value =
        messages.Below(2) == 0 ? std::byte{0xff} : static_cast<std::byte>(messages.Below(256));
    switch (messages.Below(3)) {
      case 0:
        *place = value;
        break;
      case 1:
        bytes.insert(place, 1 + messages.Below(10), value);
        break;
      default:
        bytes.erase(place);
    }
    Feed(bytes);
  }
}

// A count that is believed before its elements are there would ask for terabytes.
TEST(WireBoundsTest, CountsAreHeldAgainstTheBytesThatFollow) {
  const std::initializer_list<std::pair<Bytes, const char*>> prefixes = {
      {FromHex({0x53, 7, 1, 0, 0}), "report items"},
      {FromHex({0x53, 7, 1, 1, 1}), "batches"},
      {FromHex({0x53, 7, 1, 1, 1, 1, 0, 1}), "entries"},
      {FromHex({0x53, 7, 1, 1, 1, 1, 0, 1, 1, 2}), "evicted ids"},
      {FromHex({0x53, 7, 1, 0, 0, 1, 0, 0, 9, 0}), "absent bits"},
      {FromHex({0x53, 7, 1, 0, 0, 1, 0, 0, 9, 0, 0}), "silent ranks"},
  };
  for (const auto& [prefix, field] : prefixes) {
    for (const std::uint64_t count :
         {std::uint64_t{1000}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
      ByteWriter writer;
      writer.Varint(count);
      Bytes bytes = prefix;
      for (const std::byte byte : writer.Take()) bytes.push_back(byte);
      bytes.resize(bytes.size() + 8);
      EXPECT_THAT(DecodeOnly(bytes).message(), HasSubstr(field)) << count;
    }
  }
}

TEST(WireBoundsTest, ErrorsNameTheFieldAndTheByte) {
  EXPECT_EQ(DecodeOnly({}).message(), "magic at byte 0 is cut off");
  EXPECT_EQ(DecodeOnly(FromHex({0x54})).message(), "magic at byte 0 does not begin a message");
  const Bytes newer = FromHex({0x53, 8});
  Message message;
  for (const Status& status : {DecodeOnly(newer), DecodeFrame(newer, &message)}) {
    EXPECT_EQ(status.message(), "version at byte 1 is 8, this build speaks 7");
  }
  EXPECT_EQ(DecodeOnly(FromHex({0x53, 7, 1, 9})).message(),
            "message kind at byte 3 is 9, at most 8 is known");
  EXPECT_EQ(DecodeOnly(FromHex({0x53, 7, 1, 4, 0, 0})).message(),
            "message at byte 5 has 1 more bytes");
}

TEST(WireBoundsTest, RanksBeyondIntAreErrors) {
  // The answer to query 9: key #0 of set 0, one range from 2^31 - 1 on, then of two ranks.
  const Bytes prefix = FromHex({0x53, 7, 1, 3, 0, 2, 0, 9, 1, 0xff, 0xff, 0xff, 0xff, 0x07});
  Bytes one = prefix;
  one.insert(one.end(), {std::byte{0}, std::byte{0}});
  EXPECT_TRUE(DecodeOnly(one).ok());
  Bytes two = prefix;
  two.insert(two.end(), {std::byte{1}, std::byte{0}});
  EXPECT_THAT(DecodeOnly(two).message(), HasSubstr("missing ranks"));
}

TEST(WireBoundsTest, AFaultThatSaysOkIsAnError) {
  EXPECT_THAT(DecodeOnly(FromHex({0x53, 7, 1, 6, 0, 0, 0, 0, 0, 0})).message(),
              HasSubstr("status code"));
}

TEST(WireBoundsTest, LongTextsAreCutBetweenCharacters) {
  // Two bytes each, so that the limit less the dots falls into the middle of one.
  std::string text;
  while (text.size() <= kMaxTextBytes) text += "\xc3\xa9";
  const Message received =
      DecodedOrDie(Encode({1, FaultMessage{{StatusCode::kAborted, text, 0, "a", "", 0}}}));
  const std::string& cut = std::get<FaultMessage>(received.body).cause.text;
  EXPECT_EQ(cut.size(), kMaxTextBytes - 1);
  EXPECT_EQ(cut.substr(cut.size() - 5), "\xc3\xa9...");
}

TEST(WireBoundsTest, TextsOfTheLargestSizeAreWhole) {
  const std::string text(kMaxTextBytes, 'x');
  const Message received =
      DecodedOrDie(Encode({1, FaultMessage{{StatusCode::kAborted, text, 0, "a", "", 0}}}));
  EXPECT_EQ(std::get<FaultMessage>(received.body).cause.text, text);
}

TEST(WireBoundsTest, ActivitiesBeyondTheLimitAreLeftOut) {
  AnswerMessage answer{Key::Named(0, "w"), 0, RankRanges{1}, {}};
  answer.activities.resize(kMaxActivities + 5);
  const Message received = DecodedOrDie(Encode({1, answer}));
  EXPECT_EQ(std::get<AnswerMessage>(received.body).activities.size(), kMaxActivities);
}

TEST(WireDeathTest, ANameBeyondTheLimitIsABug) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const Message message{1, QueryMessage{Key::Named(0, std::string(kMaxNameBytes + 1, 'n'))}};
  EXPECT_DEATH(Encode(message), "names are checked at submission");
}

TEST(WireDeathTest, AKeyOfAnotherSetThanItsBatchIsABug) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const Message message{
      1,
      StreamMessage{1, {Batch{2, 1, {FailEntry{Key::Named(3, "w"), StatusCode::kMismatch, ""}}}}}};
  EXPECT_DEATH(Encode(message), "a key is of the set");
}

}  // namespace
}  // namespace sirtaki::core
