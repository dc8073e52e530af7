#include "core/base/recycling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/test_scale.h"

namespace sirtaki::core {
namespace {

using tests::ScaledCount;
using tests::TestSeed;

// An object fills all of its memory, so that one who has the same memory is noticed.
class Filled {
 public:
  explicit Filled(std::uint64_t value) { values_.fill(value); }
  bool IsAll(std::uint64_t value) const {
    return std::all_of(values_.begin(), values_.end(), [value](auto v) { return v == value; });
  }

 private:
  std::array<std::uint64_t, 12> values_{};
};

#ifndef __SANITIZE_ADDRESS__
TEST(RecyclingTest, AnObjectGetsTheMemoryOfOneThatIsGone) {
  struct OfThisTest {
    std::array<std::byte, 64> bytes{};
  };
  auto first = MakeRecycled<OfThisTest>();
  const auto* const memory = first.get();
  first.reset();
  const auto second = MakeRecycled<OfThisTest>();
  const auto third = MakeRecycled<OfThisTest>();
  EXPECT_EQ(second.get(), memory);
  EXPECT_NE(third.get(), memory);
}
#endif

TEST(RecyclingTest, NoTwoObjectsOfSeveralThreadsHaveTheSameMemory) {
  const std::uint64_t seed = TestSeed();
  const auto run = [seed](std::uint64_t thread) {
    std::mt19937_64 random(seed + thread);
    std::vector<std::pair<std::uint64_t, std::shared_ptr<Filled>>> live;
    std::uint64_t next = thread << 32;
    for (int i = 0, end = ScaledCount(20000, 500000); i < end; ++i) {
      if (live.empty() || random() % 2 == 0) {
        live.emplace_back(next, MakeRecycled<Filled>(next));
        ++next;
      } else {
        std::swap(live[random() % live.size()], live.back());
        ASSERT_TRUE(live.back().second->IsAll(live.back().first));
        live.pop_back();
      }
    }
    for (const auto& [value, object] : live) ASSERT_TRUE(object->IsAll(value));
  };
  std::vector<std::thread> threads;
  for (std::uint64_t thread = 1; thread <= 4; ++thread) threads.emplace_back(run, thread);
  for (std::thread& thread : threads) thread.join();
}

// More are live at once than are kept: the others' memory goes back to malloc.
TEST(RecyclingTest, MoreObjectsThanAreKeptComeAndGo) {
  for (int round = 0; round < 2; ++round) {
    std::vector<std::shared_ptr<Filled>> objects;
    for (std::uint64_t i = 0; i < 3000; ++i) objects.push_back(MakeRecycled<Filled>(i));
    for (std::uint64_t i = 0; i < 3000; ++i) ASSERT_TRUE(objects[i]->IsAll(i));
  }
}

}  // namespace
}  // namespace sirtaki::core
