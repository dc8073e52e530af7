#include "ops/shm/pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace sirtaki::ops::shm {
namespace {

constexpr std::int64_t kKi = 1024;
constexpr std::int64_t kMebibyte = 1024 * kKi;

std::shared_ptr<Pool> MakePool(PoolOptions options) {
  std::shared_ptr<Pool> pool;
  const core::Status status = Pool::Make(options, &pool);
  EXPECT_TRUE(status.ok()) << status.message();
  return pool;
}

std::shared_ptr<Pool> MakePool(std::int64_t bytes) {
  PoolOptions options;
  options.bytes = bytes;
  return MakePool(options);
}

// Pages that the system has given to the pool.
std::int64_t Resident(const Pool& pool) {
  struct stat file {};
  EXPECT_EQ(fstat(pool.region().descriptor(), &file), 0);
  return static_cast<std::int64_t>(file.st_blocks) * 512;
}

void* Filled(Pool& pool, std::int64_t bytes) {
  void* const block = pool.TryAllocate(bytes);
  EXPECT_NE(block, nullptr);
  if (block != nullptr) std::memset(block, 1, static_cast<std::size_t>(bytes));
  return block;
}

TEST(PoolTest, ALimitMayChange) {
  const auto pool = MakePool(8 * kMebibyte);
  void* const block = Filled(*pool, 4 * kMebibyte);
  pool->SetLimit(2 * kMebibyte);
  EXPECT_EQ(pool->TryAllocate(kMebibyte), nullptr) << "what is in use stays, and counts";
  pool->Free(block);
  pool->SetLimit(2 * kMebibyte);
  EXPECT_EQ(pool->Use().cached_bytes, 0);
  EXPECT_EQ(pool->TryAllocate(4 * kMebibyte), nullptr);
  pool->SetLimit(8 * kMebibyte);
  pool->Free(Filled(*pool, 4 * kMebibyte));
}

TEST(PoolTest, BlocksWasteAnEighthAtMost) {
  for (std::int64_t bytes = 0; bytes < 40 * kMebibyte; bytes += 1 + bytes / 23) {
    const std::int64_t size = Pool::SizeOfBlock(bytes);
    EXPECT_EQ(size % (4 * kKi), 0);
    EXPECT_GE(size, bytes);
    const std::int64_t pages = (std::max<std::int64_t>(bytes, 1) + 4 * kKi - 1) / (4 * kKi);
    EXPECT_LE(size, pages * 4 * kKi + bytes / 8) << bytes;
    EXPECT_EQ(Pool::SizeOfBlock(size), size);
  }
}

TEST(PoolTest, TheBlockFreedLastIsGivenFirst) {
  const auto pool = MakePool(kMebibyte);
  void* const first = pool->TryAllocate(10000);
  void* const second = pool->TryAllocate(10000);
  ASSERT_NE(first, second);
  pool->Free(first);
  pool->Free(second);
  EXPECT_EQ(pool->TryAllocate(9000), second);
  EXPECT_EQ(pool->TryAllocate(12000), first);
}

TEST(PoolTest, IsUsedUpAtItsLimitAndThenGivesFromTheHeap) {
  const auto pool = MakePool(kMebibyte);
  const std::shared_ptr<void> all = pool->Allocate(kMebibyte);
  EXPECT_TRUE(pool->Contains(all.get()));
  EXPECT_EQ(pool->TryAllocate(1), nullptr);
  const std::shared_ptr<void> more = pool->Allocate(kMebibyte);
  EXPECT_FALSE(pool->Contains(more.get()));
  std::memset(more.get(), 1, kMebibyte);
  EXPECT_EQ(pool->Use().refusals, 2);
  EXPECT_EQ(pool->TryAllocate(std::int64_t{1} << 62), nullptr);
}

TEST(PoolTest, WhatIsKeptMakesRoomForOtherSizes) {
  const auto pool = MakePool(kMebibyte);
  pool->Free(Filled(*pool, kMebibyte));
  EXPECT_EQ(pool->Use().cached_bytes, kMebibyte);
  void* const half = Filled(*pool, kMebibyte / 2);
  ASSERT_NE(half, nullptr);
  EXPECT_EQ(pool->Use().cached_bytes, 0);
  EXPECT_EQ(pool->Use().returned_bytes, kMebibyte);
  EXPECT_EQ(Resident(*pool), kMebibyte / 2);
}

TEST(PoolTest, ReportsWhatItHolds) {
  const auto pool = MakePool(8 * kMebibyte);
  void* const one = Filled(*pool, kMebibyte);
  void* const other = Filled(*pool, 2 * kMebibyte);
  pool->Free(one);
  const PoolUse use = pool->Use();
  EXPECT_EQ(use.in_use_bytes, 2 * kMebibyte);
  EXPECT_EQ(use.cached_bytes, kMebibyte);
  EXPECT_EQ(use.peak_bytes, 3 * kMebibyte);
  EXPECT_EQ(use.limit_bytes, 8 * kMebibyte);
  EXPECT_EQ(use.allocations, 2);
  EXPECT_EQ(use.refusals, 0);
  pool->Free(other);
}

TEST(PoolTest, TrimGivesPagesBack) {
  const auto pool = MakePool(8 * kMebibyte);
  void* const stays = Filled(*pool, kMebibyte);
  pool->Free(Filled(*pool, 2 * kMebibyte));
  EXPECT_EQ(Resident(*pool), 3 * kMebibyte);
  pool->Trim(0);
  EXPECT_EQ(Resident(*pool), kMebibyte);
  EXPECT_EQ(pool->Use().cached_bytes, 0);
  EXPECT_EQ(pool->Use().returned_bytes, 2 * kMebibyte);
  EXPECT_EQ(static_cast<const char*>(stays)[kMebibyte - 1], 1);
}

TEST(PoolTest, KeepsAsMuchAsWasLatelyInUse) {
  core::TimePoint now{};
  PoolOptions options;
  options.bytes = 64 * kMebibyte;
  options.keep_bytes = kMebibyte;
  options.now = [&now] { return now; };
  const auto pool = MakePool(options);
  // Blocks of two sizes in turn, so that none is used again.
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(Filled(*pool, kMebibyte));
  for (void* block : std::exchange(blocks, {})) pool->Free(block);
  for (int i = 0; i < 4; ++i) blocks.push_back(Filled(*pool, 2 * kMebibyte));
  for (void* block : std::exchange(blocks, {})) pool->Free(block);
  EXPECT_EQ(pool->Use().cached_bytes, 8 * kMebibyte);  // the most that was in use, not 16
  EXPECT_EQ(Resident(*pool), 8 * kMebibyte);
  for (int windows = 0; windows < 2; ++windows) {
    now += Pool::kWindow;
    for (int i = 0; i < 64; ++i) pool->Free(pool->TryAllocate(1));
  }
  EXPECT_LE(pool->Use().cached_bytes, kMebibyte);
  EXPECT_LE(Resident(*pool), kMebibyte);
}

TEST(PoolTest, KeepsNoMoreThanHalfOfAllWithWhatIsInUse) {
  PoolOptions options;
  options.bytes = 16 * kMebibyte;
  options.keep_bytes = kMebibyte;
  const auto pool = MakePool(options);
  std::vector<void*> blocks;
  for (int i = 0; i < 12; ++i) blocks.push_back(Filled(*pool, kMebibyte));
  for (int i = 0; i < 9; ++i) pool->Free(blocks[static_cast<std::size_t>(i)]);
  EXPECT_EQ(pool->Use().in_use_bytes, 3 * kMebibyte);
  EXPECT_EQ(pool->Use().cached_bytes, 5 * kMebibyte);
  EXPECT_EQ(Resident(*pool), 8 * kMebibyte);
}

TEST(PoolTest, DoesNotRunOutOfAddressesOverALongRun) {
  PoolOptions options;
  options.bytes = 256 * kMebibyte;
  const auto pool = MakePool(options);
  std::mt19937_64 random(3);
  std::vector<std::pair<std::byte*, std::int64_t>> blocks;
  std::int64_t in_use = 0;
  for (int i = 0; i < 50000; ++i) {
    // From a page to 16 MiB, small ones more often.
    const std::int64_t bytes =
        (4 * kKi << random() % 13) * static_cast<std::int64_t>(8 + random() % 8) / 8;
    while (in_use + Pool::SizeOfBlock(bytes) > options.bytes) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      auto [block, size] = blocks.back();
      blocks.pop_back();
      ASSERT_EQ(*block, static_cast<std::byte>(size >> 12));
      ASSERT_EQ(block[size - 1], static_cast<std::byte>(size >> 12));
      pool->Free(block);
      in_use -= Pool::SizeOfBlock(size);
    }
    auto* const block = static_cast<std::byte*>(pool->TryAllocate(bytes));
    ASSERT_NE(block, nullptr) << i;
    *block = block[bytes - 1] = static_cast<std::byte>(bytes >> 12);
    blocks.emplace_back(block, bytes);
    in_use += Pool::SizeOfBlock(bytes);
    ASSERT_EQ(pool->Use().in_use_bytes, in_use);
    ASSERT_LE(in_use + pool->Use().cached_bytes, options.bytes);
  }
  EXPECT_EQ(pool->Use().refusals, 0);
  for (const auto& block : blocks) pool->Free(block.first);
  pool->Trim(0);
  EXPECT_EQ(Resident(*pool), 0);
  EXPECT_NE(pool->TryAllocate(options.bytes), nullptr);
}

TEST(PoolTest, ThreadsMayFreeWhatOthersTook) {
  const auto pool = MakePool(64 * kMebibyte);
  constexpr int kThreads = 4;
  constexpr int kRounds = 20000;
  core::Mutex mutex;
  std::vector<std::pair<int*, std::int64_t>> common;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < kRounds; ++i) {
        const std::int64_t bytes = 4 * kKi + random() % (60 * kKi);
        auto* mine = static_cast<int*>(pool->TryAllocate(bytes));
        ASSERT_NE(mine, nullptr);
        mine[0] = mine[bytes / 4 - 1] = static_cast<int>(bytes);
        std::pair<int*, std::int64_t> theirs{};
        {
          core::MutexLock lock(mutex);
          common.emplace_back(mine, bytes);
          if (common.size() > 64) {
            std::swap(common[random() % 64], common.back());
            theirs = common.back();
            common.pop_back();
          }
        }
        if (theirs.first == nullptr) continue;
        ASSERT_EQ(theirs.first[0], theirs.second);
        ASSERT_EQ(theirs.first[theirs.second / 4 - 1], theirs.second);
        pool->Free(theirs.first);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& block : common) pool->Free(block.first);
  EXPECT_EQ(pool->Use().in_use_bytes, 0);
  EXPECT_EQ(pool->Use().allocations, kThreads * kRounds);
}

TEST(PoolTest, APrivateOneGivesItsPagesBackToo) {
  PoolOptions options;
  options.bytes = 8 * kMebibyte;
  options.shared = false;
  const auto pool = MakePool(options);
  void* const block = Filled(*pool, 4 * kMebibyte);
  pool->Free(block);
  pool->Trim(0);
  unsigned char resident[1024] = {};
  ASSERT_EQ(mincore(block, 4 * kMebibyte, resident), 0);
  EXPECT_EQ(std::count_if(std::begin(resident), std::end(resident),
                          [](unsigned char page) { return (page & 1) != 0; }),
            0);
}

TEST(PoolDeathTest, WhatIsFreedTwiceIsNoticed) {
  const auto pool = MakePool(kMebibyte);
  void* const block = pool->TryAllocate(1);
  pool->Free(block);
  EXPECT_DEATH(pool->Free(block), "not a block of the pool in use");
}

}  // namespace
}  // namespace sirtaki::ops::shm
