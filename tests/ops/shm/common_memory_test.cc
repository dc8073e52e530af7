#include "ops/shm/common_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/support/forked_child.h"

namespace sirtaki::ops::shm {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kCommonBytes = 10 * 4096;

std::shared_ptr<CommonMemory> MakeCommon() {
  std::shared_ptr<CommonMemory> memory;
  const core::Status status = CommonMemory::Create(kCommonBytes, &memory);
  EXPECT_TRUE(status.ok()) << status.message();
  return memory;
}

std::shared_ptr<CommonMemory> OpenCommon(const CommonMemory::Name& name) {
  std::shared_ptr<CommonMemory> memory;
  const core::Status status = CommonMemory::Open(name, kCommonBytes, &memory);
  EXPECT_TRUE(status.ok()) << status.message();
  return memory;
}

// The bytes that the ranges have, once each.
std::vector<bool> Written(const CommonMemory& memory) {
  std::vector<CommonMemory::Range> ranges;
  EXPECT_TRUE(memory.FindWritten(&ranges).ok());
  std::vector<bool> written(kCommonBytes);
  for (const CommonMemory::Range& range : ranges) {
    EXPECT_LT(range.begin, range.end);
    for (std::int64_t at = range.begin; at < std::min(range.end, kCommonBytes); ++at) {
      EXPECT_FALSE(written[static_cast<std::size_t>(at)]);
      written[static_cast<std::size_t>(at)] = true;
    }
  }
  return written;
}

bool AnyOf(const std::vector<bool>& written) {
  return std::find(written.begin(), written.end(), true) != written.end();
}

TEST(CommonMemoryTest, WhatIsCommonIsSeenByAllAndWhatIsOwnByNobodyElse) {
  const auto first = MakeCommon();
  const auto second = OpenCommon(first->name());
  first->common()[0] = std::byte{1};
  second->common()[kCommonBytes - 1] = std::byte{2};
  for (const auto& memory : {first, second}) {
    EXPECT_EQ(memory->own()[0], std::byte{1});
    EXPECT_EQ(memory->own()[kCommonBytes - 1], std::byte{2});
    EXPECT_FALSE(AnyOf(Written(*memory))) << "reading is no writing";
  }
  second->own()[0] = std::byte{3};
  EXPECT_EQ(second->common()[0], std::byte{1});
  EXPECT_EQ(first->own()[0], std::byte{1});
  first->common()[0] = std::byte{4};
  EXPECT_EQ(first->own()[0], std::byte{4});
  EXPECT_EQ(second->own()[0], std::byte{3}) << "until it lets go";
}

TEST(CommonMemoryTest, FindsEachPageThatWasWrittenAndLetsGoOfIt) {
  const auto first = MakeCommon();
  const auto memory = OpenCommon(first->name());
  for (std::int64_t at = 0; at < kCommonBytes; ++at) first->common()[at] = std::byte{1};
  const std::vector<std::int64_t> places = {0, 3 * 4096, 4 * 4096 + 7, kCommonBytes - 1};
  for (const std::int64_t place : places) memory->own()[place] = std::byte{2};
  std::vector<bool> written = Written(*memory);
  for (const std::int64_t place : places) EXPECT_TRUE(written[static_cast<std::size_t>(place)]);
  EXPECT_LE(std::count(written.begin(), written.end(), true), 5 * 4096);
  EXPECT_FALSE(AnyOf(Written(*first)));

  std::vector<CommonMemory::Range> ranges;
  ASSERT_TRUE(memory->FindWritten(&ranges).ok());
  for (const CommonMemory::Range& range : ranges) memory->LetGo(range);
  EXPECT_FALSE(AnyOf(Written(*memory)));
  for (std::int64_t at = 0; at < kCommonBytes; ++at)
    ASSERT_EQ(memory->own()[at], std::byte{1}) << at;
}

TEST(CommonMemoryTest, LetsGoOfAPageThatTheProgramHasLocked) {
  const auto first = MakeCommon();
  const auto memory = OpenCommon(first->name());
  if (mlock(memory->own(), 4096) != 0) GTEST_SKIP() << "no page may be locked here";
  memory->own()[0] = std::byte{2};
  first->common()[0] = std::byte{1};
  std::vector<CommonMemory::Range> ranges;
  ASSERT_TRUE(memory->FindWritten(&ranges).ok());
  ASSERT_EQ(ranges.size(), 1U);
  memory->LetGo(ranges.front());
  EXPECT_EQ(memory->own()[0], std::byte{1});
}

TEST(CommonMemoryTest, OtherProcessesAndForkedChildren) {
  const auto memory = MakeCommon();
  memory->common()[5] = std::byte{1};
  EXPECT_EQ(tests::InChild([&] {
              memory->own()[5] = std::byte{9};  // what a forked child has is its own
              const auto opened = OpenCommon(memory->name());
              if (opened == nullptr || opened->own()[5] != std::byte{1}) return 1;
              if (AnyOf(Written(*opened))) return 2;
              opened->own()[4096 * 2] = std::byte{9};
              opened->common()[6] = std::byte{2};
              return AnyOf(Written(*opened)) ? 0 : 3;
            }),
            0);
  EXPECT_EQ(memory->own()[5], std::byte{1});
  EXPECT_EQ(memory->own()[6], std::byte{2});
  EXPECT_EQ(memory->own()[4096 * 2], std::byte{0});
  EXPECT_FALSE(AnyOf(Written(*memory)));
}

TEST(CommonMemoryTest, AForkedChildKeepsWhatItsParentHadThen) {
  const auto memory = MakeCommon();
  memory->common()[5] = std::byte{1};
  memory->own()[4096] = std::byte{2};
  EXPECT_EQ(
      tests::InChild(
          [&] {
            return memory->own()[5] == std::byte{1} && memory->own()[4096] == std::byte{2} ? 0 : 1;
          },
          [&] { memory->common()[5] = std::byte{3}; }),  // as a step does
      0);
  EXPECT_EQ(memory->own()[5], std::byte{3});
}

TEST(CommonMemoryTest, AnotherMemoryUnderTheNameIsRefused) {
  const auto memory = MakeCommon();
  CommonMemory::Name name = memory->name();
  ++name.token;
  std::shared_ptr<CommonMemory> opened;
  EXPECT_THAT(CommonMemory::Open(name, kCommonBytes, &opened).message(), HasSubstr("of this job"));
  EXPECT_FALSE(CommonMemory::Open(memory->name(), 2 * kCommonBytes, &opened).ok());
  name = memory->name();
  name.descriptor += 1000;
  EXPECT_FALSE(CommonMemory::Open(name, kCommonBytes, &opened).ok());
  EXPECT_EQ(opened, nullptr);
}

}  // namespace
}  // namespace sirtaki::ops::shm
