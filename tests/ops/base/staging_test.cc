#include "ops/base/staging.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

namespace sirtaki::ops {
namespace {

TEST(StagingTest, IsAlignedAndGrows) {
  Staging staging;
  for (const std::int64_t bytes : {0, 1, 100, 4096, 4097, 100000}) {
    void* const memory = staging.Reserve(bytes);
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % Staging::kAlignment, 0u);
    EXPECT_GE(staging.capacity(), bytes);
    std::memset(memory, 1, static_cast<std::size_t>(bytes));
  }
}

TEST(StagingTest, KeepsItsMemoryWhileItSuffices) {
  Staging staging;
  void* const memory = staging.Reserve(10000);
  EXPECT_EQ(staging.Reserve(10), memory);
  EXPECT_EQ(staging.Reserve(10000), memory);
}

TEST(StagingPoolTest, UsesWhatCameBack) {
  StagingPool pool;
  std::unique_ptr<Staging> first = pool.Take();
  void* const memory = first->Reserve(1);
  pool.Return(std::move(first));
  EXPECT_EQ(pool.Take()->Reserve(1), memory);
}

}  // namespace
}  // namespace sirtaki::ops
