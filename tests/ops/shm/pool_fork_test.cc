#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#include "ops/shm/pool.h"
#include "tests/support/forked_child.h"

namespace sirtaki::ops::shm {
namespace {

constexpr std::int64_t kMi = std::int64_t{1} << 20;

class PoolForkTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    PoolOptions options;
    options.bytes = 64 * kMi;
    options.shared = GetParam();
    ASSERT_TRUE(Pool::Make(options, &pool_).ok());
  }
  int* Numbers(std::int64_t bytes, int value) {
    auto* const numbers = static_cast<int*>(pool_->TryAllocate(bytes));
    for (std::int64_t i = 0; i < bytes / 4; ++i) numbers[i] = value;
    return numbers;
  }
  static bool All(const int* numbers, std::int64_t bytes, int value) {
    for (std::int64_t i = 0; i < bytes / 4; ++i) {
      if (numbers[i] != value) return false;
    }
    return true;
  }

  std::shared_ptr<Pool> pool_;
};

TEST_P(PoolForkTest, ParentAndChildDoNotSeeEachOthersChanges) {
  int* const small = Numbers(8192, 1);
  pool_->Free(Numbers(kMi, 9));  // kept: not looked at by anyone
  int* const large = Numbers(5 * kMi, 2);
  const int result = tests::InChild(
      [&] {
        if (!All(small, 8192, 1) || !All(large, 5 * kMi, 2)) return 1;
        std::memset(small, 0, 8192);
        std::memset(large, 0, 5 * kMi);
        return 0;
      },
      [&] { small[7] = large[7] = 77; });
  EXPECT_EQ(result, 0);
  EXPECT_EQ(small[7], 77);
  EXPECT_EQ(small[8], 1);
  EXPECT_EQ(large[7], 77);
  EXPECT_EQ(large[5 * kMi / 4 - 1], 2);
}

TEST_P(PoolForkTest, TheChildMayFreeAndAllocate) {
  int* const before = Numbers(kMi, 3);
  int* const stays = Numbers(kMi, 4);
  EXPECT_EQ(tests::InChild([&] {
              pool_->Free(before);
              const std::shared_ptr<void> fresh = pool_->Allocate(kMi);
              std::memset(fresh.get(), 0x55, kMi);
              pool_->Trim(0);
              return All(stays, kMi, 4) ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(All(before, kMi, 3));
  EXPECT_TRUE(All(stays, kMi, 4));
}

TEST_P(PoolForkTest, AGrandchildHasItsOwnCopyToo) {
  int* const numbers = Numbers(kMi, 5);
  EXPECT_EQ(tests::InChild([&] {
              numbers[0] = 6;
              const int result = tests::InChild([&] {
                const bool right = numbers[0] == 6 && numbers[1] == 5;
                numbers[1] = 7;
                return right ? 0 : 1;
              });
              return result == 0 && numbers[1] == 5 ? 0 : 2;
            }),
            0);
  EXPECT_TRUE(All(numbers, kMi, 5));
}

TEST_P(PoolForkTest, OtherThreadsMayGoOnMeanwhile) {
  int* const numbers = Numbers(kMi, 8);
  std::atomic<bool> done{false};
  std::thread busy([&] {
    while (!done.load()) {
      int* const block = Numbers(16384, 1);
      pool_->Free(block);
    }
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(tests::InChild(
                  [&] { return All(numbers, kMi, 8) && pool_->Use().in_use_bytes > 0 ? 0 : 1; }),
              0);
  }
  done = true;
  busy.join();
}

TEST(PoolForkCopyTest, WhatWasNeverTouchedTakesNoMemory) {
  std::shared_ptr<Pool> pool;
  ASSERT_TRUE(Pool::Make({.bytes = 64 * kMi}, &pool).ok());
  void* const untouched = pool->TryAllocate(32 * kMi);
  EXPECT_EQ(tests::InChild([&] { return *static_cast<char*>(untouched); }), 0);
  struct stat file {};
  ASSERT_EQ(fstat(pool->region().descriptor(), &file), 0);
  EXPECT_EQ(file.st_blocks, 0);
}

TEST_P(PoolForkTest, WithoutAddressesForACopyTheParentIsStillSafe) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer needs more addresses itself";
#endif
  int* const numbers = Numbers(kMi, 1);
  // In a process that may have no more addresses than it has.
  EXPECT_EQ(tests::InChild([&] {
              PoolOptions options;
              options.bytes = std::int64_t{1} << 30;
              options.shared = GetParam();
              std::shared_ptr<Pool> pool;
              if (!Pool::Make(options, &pool).ok()) return 1;
              auto* const own = static_cast<int*>(pool->TryAllocate(4096));
              own[0] = 11;
              const rlimit limit{std::size_t{6} << 30, std::size_t{6} << 30};
              if (setrlimit(RLIMIT_AS, &limit) != 0) return 2;
              const int result = tests::InChild([&] {
                const bool right = own[0] == 11;
                own[0] = 12;
                return right ? 0 : 3;
              });
              return own[0] == 11 ? result : 4;
            }),
            0);
  EXPECT_TRUE(All(numbers, kMi, 1));
}

INSTANTIATE_TEST_SUITE_P(Memory, PoolForkTest, testing::Values(true, false),
                         [](const auto& kind) { return kind.param ? "Shared" : "Private"; });

}  // namespace
}  // namespace sirtaki::ops::shm
