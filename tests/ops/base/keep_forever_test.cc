#include "ops/base/keep_forever.h"

#include <gtest/gtest.h>

#include <memory>
#include <new>

namespace sirtaki::ops {
namespace {

TEST(KeepForeverTest, WhatIsLetGoGoesAndTheRestStays) {
  bool answer = false;
  auto first = std::make_shared<int>(1);
  auto second = std::make_shared<int>(2);
  const std::weak_ptr<int> watched_first = first;
  const std::weak_ptr<int> watched_second = second;
  KeepUntil([] { return false; }, std::move(first));
  KeepUntil([&answer] { return answer; }, std::move(second));
  EXPECT_FALSE(watched_second.expired());
  answer = true;
  DropKept();
  EXPECT_TRUE(watched_second.expired());
  EXPECT_FALSE(watched_first.expired());
}

// The question may need memory itself.
TEST(KeepForeverTest, NothingIsLostWhereMemoryIsTooShortToAsk) {
  bool is_short = true;
  auto first = std::make_shared<int>(1);
  auto second = std::make_shared<int>(2);
  const std::weak_ptr<int> watched_first = first;
  const std::weak_ptr<int> watched_second = second;
  bool answer = false;
  KeepUntil([&answer] { return answer; }, std::move(first));
  KeepUntil(
      [&is_short] {
        if (is_short) throw std::bad_alloc();
        return true;
      },
      std::move(second));
  answer = true;
  DropKept();
  EXPECT_FALSE(watched_first.expired());
  EXPECT_FALSE(watched_second.expired());
  is_short = false;
  DropKept();
  EXPECT_TRUE(watched_first.expired());
  EXPECT_TRUE(watched_second.expired());
}

}  // namespace
}  // namespace sirtaki::ops
