#include "frameworks/torch/tensors/cpu_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "ops/shm/pool.h"
#include "tests/support/forked_child.h"

namespace sirtaki::tests {
namespace {

constexpr std::int64_t kMi = std::int64_t{1} << 20;

// Freed when the process exits, after everything here.
at::Tensor& TensorThatLivesToTheEnd() {
  static at::Tensor tensor;
  return tensor;
}

ops::shm::Pool& ThePool() {
  static ops::shm::Pool& pool = *[] {
    static auto& made = *new std::shared_ptr<ops::shm::Pool>;
    EXPECT_TRUE(ops::shm::Pool::Make({.bytes = 64 * kMi}, &made).ok());
    return made.get();
  }();
  return pool;
}

class CpuAllocatorTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(detail::TakeCpuTensorsFrom(&ThePool(), false)); }
  void TearDown() override { ASSERT_TRUE(detail::TakeCpuTensorsFrom(nullptr, false)); }
  static bool InPool(const at::Tensor& tensor) {
    return ThePool().Contains(tensor.const_data_ptr());
  }
};

TEST_F(CpuAllocatorTest, LargeTensorsLieInThePoolAndSmallOnesDoNot) {
  const at::Tensor large = torch::arange(100000);
  EXPECT_TRUE(InPool(large));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large.const_data_ptr()) % 64, 0U);
  EXPECT_EQ(large.sum().item<std::int64_t>(), 100000LL * 99999 / 2);
  EXPECT_TRUE(InPool(torch::empty({1024})));
  EXPECT_FALSE(InPool(torch::empty({1023})));
  EXPECT_EQ(torch::empty({0}).const_data_ptr(), nullptr);
}

TEST_F(CpuAllocatorTest, FreedMemoryIsUsedAgain) {
  const void* const first = torch::empty({50000}).const_data_ptr();
  EXPECT_EQ(torch::empty({50000}).const_data_ptr(), first);
}

TEST_F(CpuAllocatorTest, WhatFindsNoRoomComesFromTheHeap) {
  const at::Tensor most = torch::empty({60 * kMi}, torch::kByte);
  const at::Tensor rest = torch::ones({8 * kMi}, torch::kByte);
  EXPECT_TRUE(InPool(most));
  EXPECT_FALSE(InPool(rest));
  EXPECT_EQ(rest.sum().item<std::int64_t>(), 8 * kMi);
}

TEST_F(CpuAllocatorTest, WhatExistedBeforeAndAfterIsFreedWhereItCameFrom) {
  const std::int64_t of_others = ThePool().Use().in_use_bytes;  // which other tests have left
  ASSERT_TRUE(detail::TakeCpuTensorsFrom(nullptr, false));
  at::Tensor before = torch::ones({10000});
  EXPECT_FALSE(InPool(before));
  ASSERT_TRUE(detail::TakeCpuTensorsFrom(&ThePool(), false));
  at::Tensor during = torch::ones({10000});
  before.resize_({20000});  // by the allocator that it came from
  ASSERT_TRUE(detail::TakeCpuTensorsFrom(nullptr, false));
  during.resize_({20000});
  EXPECT_EQ(during.slice(0, 0, 10000).sum().item<float>(), 10000.0F);
  EXPECT_GT(ThePool().Use().in_use_bytes, of_others);
  during.reset();
  before.reset();
  EXPECT_EQ(ThePool().Use().in_use_bytes, of_others);
}

TEST_F(CpuAllocatorTest, TensorsAreCopiedResizedViewedAndSavedAsEver) {
  const at::Tensor tensor = torch::rand({300, 300});
  EXPECT_TRUE(torch::equal(tensor.clone(), tensor));
  EXPECT_TRUE(torch::equal(tensor.t().contiguous().t(), tensor));
  at::Tensor grown = tensor.clone();
  grown.resize_({600, 300});
  EXPECT_TRUE(InPool(grown));
  EXPECT_TRUE(torch::equal(grown.slice(0, 0, 300), tensor));
  std::vector<float> own(10000, 2.0F);
  const at::Tensor view = torch::from_blob(own.data(), {10000});
  EXPECT_FALSE(InPool(view));
  EXPECT_EQ((view * 2).sum().item<float>(), 40000.0F);
  std::stringstream file;
  torch::save(tensor, file);
  at::Tensor loaded;
  torch::load(loaded, file);
  EXPECT_TRUE(torch::equal(loaded, tensor));
}

TEST_F(CpuAllocatorTest, TheRawInterfaceWorks) {
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  for (const std::size_t bytes : {std::size_t{16}, std::size_t{1} << 16}) {
    void* const memory = allocator.raw_allocate(bytes);
    std::memset(memory, 1, bytes);
    allocator.raw_deallocate(memory);
    at::DataPtr pointer = allocator.allocate(bytes);
    EXPECT_TRUE(allocator.is_simple_data_ptr(pointer));
    EXPECT_EQ(pointer.get_deleter(), allocator.raw_deleter());
    EXPECT_NE(allocator.clone(pointer.get(), bytes).get(), pointer.get());
  }
  EXPECT_EQ(allocator.allocate(0).get(), nullptr);
}

TEST_F(CpuAllocatorTest, ThreadsTrainSideBySide) {
  std::vector<std::thread> threads;
  std::vector<double> sums(4);
  for (std::size_t t = 0; t < sums.size(); ++t) {
    threads.emplace_back([&sums, t] {
      at::Tensor weight = torch::ones({64, 64}, torch::requires_grad());
      for (int step = 0; step < 50; ++step) {
        weight.mutable_grad().reset();
        (torch::ones({32 + 8 * step, 64}).matmul(weight)).sum().backward();
        ASSERT_EQ(weight.grad().sum().item<double>(), 64.0 * 64 * (32 + 8 * step));
      }
      sums[t] = weight.sum().item<double>();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const double sum : sums) EXPECT_EQ(sum, 64.0 * 64);
}

TEST_F(CpuAllocatorTest, ADataLoaderWithWorkerThreadsWorks) {
  auto data = torch::data::datasets::TensorDataset(torch::ones({256, 2048}))
                  .map(torch::data::transforms::Stack<torch::data::TensorExample>());
  auto loader = torch::data::make_data_loader(
      std::move(data), torch::data::DataLoaderOptions().batch_size(16).workers(2));
  double sum = 0;
  for (const auto& batch : *loader) {
    EXPECT_TRUE(InPool(batch.data));
    sum += batch.data.sum().item<double>();
  }
  EXPECT_EQ(sum, 256.0 * 2048);
}

TEST_F(CpuAllocatorTest, AForkedChildHasTensorsOfItsOwn) {
  at::set_num_threads(1);
  at::Tensor tensor = torch::full({100000}, 3.0);
  ASSERT_TRUE(InPool(tensor));
  EXPECT_EQ(InChild([&] {
              if (tensor.sum().item<double>() != 300000.0) return 1;
              tensor.fill_(4);
              at::Tensor fresh = tensor + 1;
              if (InPool(fresh) || fresh.sum().item<double>() != 500000.0) return 2;
              tensor.reset();
              return 0;
            }),
            0);
  EXPECT_EQ(tensor.sum().item<double>(), 300000.0);
  EXPECT_TRUE(InPool(tensor + 1));
}

TEST_F(CpuAllocatorTest, AChildEndsAsAProgramDoes) {
  TensorThatLivesToTheEnd() = torch::ones({100000});
  ASSERT_TRUE(InPool(TensorThatLivesToTheEnd()));
  EXPECT_EXIT(std::exit(TensorThatLivesToTheEnd().defined() ? 7 : 8), testing::ExitedWithCode(7),
              "");
}

// A program may have such an allocator: it counts, and gives what was there before.
class OwnAllocator final : public c10::Allocator {
 public:
  explicit OwnAllocator(c10::Allocator& before) : before_(before) {}
  at::DataPtr allocate(std::size_t bytes) override {
    ++count;
    return before_.allocate(bytes);
  }
  at::DeleterFnPtr raw_deleter() const override { return before_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  int count = 0;

 private:
  c10::Allocator& before_;
};

TEST_F(CpuAllocatorTest, AProgramsOwnAllocatorThatComesLaterIsUsed) {
  c10::Allocator* const ours = c10::GetCPUAllocator();
  static OwnAllocator own(*ours);
  c10::SetCPUAllocator(&own);
  const at::Tensor tensor = torch::ones({10000});
  EXPECT_EQ(own.count, 1);
  EXPECT_TRUE(InPool(tensor));
  EXPECT_FALSE(detail::TakeCpuTensorsFrom(&ThePool(), false));
  c10::SetCPUAllocator(ours);
}

}  // namespace
}  // namespace sirtaki::tests
