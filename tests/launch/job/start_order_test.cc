#include "launch/job/start_order.h"

#include <gtest/gtest.h>

#include <string>

namespace sirtaki::launch {
namespace {

const StartOrder kOrder = {
    {{"KEY", "a b\n'\"$"}, {"EMPTY", ""}, {"BYTES", std::string("\0\xff", 2)}},
    {"/opt/sirtaki/bin/sirtakirun", "--as-rank", "--", "./train", ""}};

// Takes an order as a daemon of the version does; the error, or nothing.
std::string Take(const std::string& bytes, std::string_view version, StartOrder* out) {
  const std::size_t end = bytes.find('\n');
  std::size_t length = 0;
  core::Status status = ReadOrderHead(bytes.substr(0, end), version, &length);
  if (!status.ok()) return status.message();
  const std::string rest = bytes.substr(end + 1);
  EXPECT_EQ(length, rest.size());
  status = ReadOrder(rest, out);
  return status.message();
}

TEST(StartOrderTest, ComesBackAsItWas) {
  StartOrder order;
  EXPECT_EQ(Take(Encode(kOrder, "0.1.0"), "0.1.0", &order), "");
  EXPECT_EQ(order, kOrder);
}

TEST(StartOrderTest, AnotherVersionIsNamed) {
  StartOrder order;
  EXPECT_EQ(
      Take(Encode(kOrder, "0.2.0"), "0.1.0", &order),
      "Sirtaki is 0.1.0 here and 0.2.0 where the run was started: install the same version on "
      "every host");
}

TEST(StartOrderTest, WhatIsNoneIsRefused) {
  std::size_t length = 7;
  for (const char* line : {"", "hello", "sirtakirun 0.1.0", "sirtakirun 0.1.0 x",
                           "sirtakirun 0.1.0 -1", "sirtakirun 0.1.0 67108865", "mpirun 0.1.0 3"}) {
    EXPECT_EQ(ReadOrderHead(line, "0.1.0", &length).code(), core::StatusCode::kProtocol) << line;
  }
  EXPECT_EQ(length, 7U);
  const std::string whole = Encode(kOrder, "0.1.0");
  const std::string bytes = whole.substr(whole.find('\n') + 1);
  StartOrder order = kOrder;
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(ReadOrder(bytes.substr(0, size), &order).ok()) << size;
  }
  EXPECT_FALSE(ReadOrder(bytes + "x", &order).ok());
  EXPECT_EQ(order, kOrder);
  const std::string no_word = Encode({}, "0.1.0");
  EXPECT_FALSE(ReadOrder(no_word.substr(no_word.find('\n') + 1), &order).ok());
}

}  // namespace
}  // namespace sirtaki::launch
