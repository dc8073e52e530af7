#include "core/base/byte_codec.h"

#include <gtest/gtest.h>

#include <limits>

namespace sirtaki::core {
namespace {

std::vector<std::byte> Of(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

TEST(ByteCodecTest, VarintsHaveSevenBitsAByte) {
  ByteWriter writer;
  writer.Varint(0);
  writer.Varint(127);
  writer.Varint(128);
  writer.Varint(300);
  EXPECT_EQ(writer.Take(), Of({0, 0x7f, 0x80, 1, 0xac, 2}));
}

TEST(ByteCodecTest, ZigzagFoldsTheSign) {
  ByteWriter writer;
  for (const int value : {0, -1, 1, -2, 2}) writer.Zigzag(value);
  EXPECT_EQ(writer.Take(), Of({0, 1, 2, 3, 4}));
}

TEST(ByteCodecTest, FixedNumbersBeginWithTheLowestByte) {
  ByteWriter writer;
  writer.Fixed64(0x0102030405060708);
  EXPECT_EQ(writer.Take(), Of({8, 7, 6, 5, 4, 3, 2, 1}));
}

TEST(ByteCodecTest, ExtremesComeBack) {
  ByteWriter writer;
  writer.Varint(std::numeric_limits<std::uint64_t>::max());
  writer.Zigzag(std::numeric_limits<std::int64_t>::min());
  writer.Zigzag(std::numeric_limits<std::int64_t>::max());
  writer.Fixed64(std::numeric_limits<std::uint64_t>::max());
  writer.Text("");
  writer.Text(std::string_view("a\0b", 3));
  const auto bytes = writer.Take();
  ByteReader reader(bytes);
  EXPECT_EQ(reader.Varint("a"), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(reader.Zigzag("b"), std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(reader.Zigzag("c"), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(reader.Fixed64("d"), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(reader.Text("e", 10), "");
  EXPECT_EQ(reader.Text("f", 10), std::string("a\0b", 3));
  reader.ExpectEnd();
  EXPECT_TRUE(reader.ok()) << reader.status().ToString();
}

TEST(ByteCodecTest, VarintsBeyond64BitsAreErrors) {
  const auto bytes = Of({0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2});
  ByteReader reader(bytes);
  EXPECT_EQ(reader.Varint("number"), 0U);
  EXPECT_EQ(reader.status().message(), "number at byte 0 does not fit into 64 bits");
}

TEST(ByteCodecTest, VarintsHaveOneForm) {
  const auto bytes = Of({0x81, 0});
  ByteReader reader(bytes);
  reader.Varint("number");
  EXPECT_EQ(reader.status().message(), "number at byte 0 is not in its shortest form");
}

TEST(ByteCodecTest, TheFirstErrorStaysAndLaterReadsGiveZero) {
  const auto bytes = Of({7, 5, 1});
  ByteReader reader(bytes);
  reader.Byte("first");
  reader.ByteUpTo("second", 4);
  EXPECT_EQ(reader.Byte("third"), 0);
  EXPECT_EQ(reader.Text("fourth", 9), "");
  reader.ExpectEnd();
  EXPECT_EQ(reader.status().message(), "second at byte 1 is 5, at most 4 is known");
}

TEST(ByteCodecTest, TextsBeyondTheirLimitAreErrors) {
  const auto bytes = Of({3, 'a', 'b', 'c'});
  ByteReader reader(bytes);
  reader.Text("name", 2);
  EXPECT_EQ(reader.status().message(), "name at byte 0 is 3, allowed is at most 2");
}

}  // namespace
}  // namespace sirtaki::core
