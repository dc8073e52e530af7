#include "ops/nccl/pinned_blocks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <vector>

#include "tests/support/fake_gpus.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;
using core::StatusCode;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using Block = std::shared_ptr<std::byte>;

constexpr std::int64_t kMega = std::int64_t{1} << 20;

class NcclPinnedBlocksTest : public ::testing::Test {
 protected:
  NcclPinnedBlocksTest() {
    EXPECT_TRUE(cuda::Device::Open(gpus_.cuda(), 1, &device_).ok());
    blocks_ = std::make_unique<PinnedBlocks>(device_);
  }
  Block Take(std::int64_t bytes) {
    Block block;
    const Status status = blocks_->Take(bytes, &block);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return block;
  }
  std::size_t allocated() const { return gpus_.calls("cudaHostAlloc").size(); }

  tests::FakeGpus gpus_;
  std::shared_ptr<cuda::Device> device_;
  std::unique_ptr<PinnedBlocks> blocks_;
};

TEST_F(NcclPinnedBlocksTest, ABlockServesOthersOfAboutItsSize) {
  Block block = Take(5000);
  const std::byte* const memory = block.get();
  std::byte* const end = block.get() + 4999;
  *end = std::byte{1};
  block.reset();
  EXPECT_EQ(Take(8000).get(), memory);
  EXPECT_NE(Take(8193).get(), memory);
  EXPECT_NE(Take(100).get(), memory);  // it would be missed
  EXPECT_EQ(allocated(), 3u);
}

TEST_F(NcclPinnedBlocksTest, NobodyHasAnothersBlock) {
  std::set<std::byte*> memories;
  std::vector<Block> taken;
  for (int i = 0; i < 10; ++i) {
    taken.push_back(Take(1 + i));
    memories.insert(taken.back().get());
  }
  EXPECT_THAT(memories, SizeIs(10));
  EXPECT_EQ(allocated(), 10u);
}

TEST_F(NcclPinnedBlocksTest, WhatIsTooMuchGoesWhenOthersAreTaken) {
  std::vector<Block> large;
  for (int i = 0; i < 3; ++i) large.push_back(Take(100 * kMega));
  large.clear();
  EXPECT_THAT(gpus_.calls("cudaFreeHost"), IsEmpty());  // whoever gives back does not wait
  Take(1);
  EXPECT_THAT(gpus_.calls("cudaFreeHost"), SizeIs(1));
  Take(100 * kMega);
  EXPECT_EQ(allocated(), 4u);
}

TEST_F(NcclPinnedBlocksTest, ABlockMayOutliveThem) {
  Block kept = Take(10);
  Take(5000);
  blocks_.reset();
  EXPECT_EQ(gpus_.live_allocations(), 1);
  kept.reset();
  EXPECT_EQ(gpus_.live_allocations(), 0);
}

TEST_F(NcclPinnedBlocksTest, NoMemoryIsSaidWithWhatItWasFor) {
  gpus_.FailNext("cudaHostAlloc", 2);
  Block block;
  const Status status = blocks_->Take(5000, &block);
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  EXPECT_THAT(status.message(), HasSubstr("8192 bytes of pinned memory for a message"));
  EXPECT_NE(Take(5000), nullptr);
}

}  // namespace
}  // namespace sirtaki::ops::nccl
