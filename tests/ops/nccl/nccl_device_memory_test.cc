// Staging memory over a table that only counts.
#include "ops/nccl/device_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/support/fake_gpus.h"

namespace sirtaki::ops::nccl {
namespace {

using ::testing::ElementsAre;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

// A table has functions, no closures.
std::vector<std::int64_t> taken;  // MiB
int given_back = 0;

TEST(NcclDeviceMemoryTest, SmallBlocksDoubleAndLargeOnesAreAsLargeAsTheyMustBe) {
  taken.clear();
  given_back = 0;
  tests::FakeGpus gpus;
  Api& api = gpus.nccl();
  api.MemAlloc = [](void** memory, std::size_t bytes) {
    taken.push_back(static_cast<std::int64_t>(bytes) / kMiB);
    *memory = &given_back;  // nobody looks
    return Result::kSuccess;
  };
  api.MemFree = [](void*) {
    ++given_back;
    return Result::kSuccess;
  };
  UniqueId id;
  ASSERT_EQ(api.GetUniqueId(&id), Result::kSuccess);
  std::unique_ptr<Communicator> communicator;
  const auto all = std::make_shared<ProcessCommunicators>(std::make_shared<const Api>(api));
  ASSERT_TRUE(Communicator::Init(all, id, 1, 0, {}, &communicator).ok());
  {
    DeviceMemory staging(gpus.cuda(), *communicator);
    std::byte* memory = nullptr;
    for (const std::int64_t wanted :
         {std::int64_t{5}, kMiB, kMiB + 1, 3 * kMiB, 40 * kMiB, 41 * kMiB, 64 * kMiB, 65 * kMiB,
          500 * kMiB, 64 * kMiB, 501 * kMiB}) {
      ASSERT_TRUE(staging.Reserve(wanted, &memory).ok());
    }
    EXPECT_THAT(taken, ElementsAre(1, 2, 4, 40, 64, 65, 500, 501));
    EXPECT_EQ(given_back, 0);  // the stream may still use what was outgrown
  }
  EXPECT_EQ(given_back, 8);
}

}  // namespace
}  // namespace sirtaki::ops::nccl
