// RANKS: 1 2
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <string>

#include "tests/support/mpi_main.h"

namespace sirtaki::tests {
namespace {

// Whether a tensor that is made now lies in the pool.
bool TensorsLieInThePool() {
  const std::int64_t before = memory_use().allocations;
  const at::Tensor tensor = torch::ones({10000});
  return memory_use().allocations > before && tensor.sum().item<float>() == 10000.0F;
}

float Sum(const at::Tensor& tensor) {
  return allreduce(tensor, AllreduceOptions().op(ReduceOp::Sum)).sum().item<float>();
}

TEST(CpuAllocatorMpiTest, IsThereFromInitOnAndStays) {
  EXPECT_FALSE(TensorsLieInThePool());
  init();
  EXPECT_TRUE(TensorsLieInThePool());
  const at::Tensor outlives = torch::ones({10000});
  shutdown();
  EXPECT_TRUE(TensorsLieInThePool());
  init();
  EXPECT_EQ(Sum(outlives), 10000.0F * static_cast<float>(size()));
  shutdown();
  EXPECT_EQ(outlives.sum().item<float>(), 10000.0F);
}

TEST(CpuAllocatorMpiTest, IsNotUsedWhereItIsOff) {
  init(InitOptions().set("allocator", "off"));
  EXPECT_FALSE(TensorsLieInThePool());
  EXPECT_EQ(Sum(torch::ones({10000})), 10000.0F * static_cast<float>(size()));
  shutdown();
}

TEST(CpuAllocatorMpiTest, WithoutSharedMemoryThePoolIsTheProcessesOwn) {
  init(InitOptions().set("shared_memory", "off"));
  EXPECT_TRUE(TensorsLieInThePool());
  EXPECT_EQ(Sum(torch::ones({10000})), 10000.0F * static_cast<float>(size()));
  shutdown();
}

TEST(CpuAllocatorMpiTest, SaysWhatItHoldsAndGivesItBack) {
  init();
  const std::int64_t before = memory_use().in_use_bytes;
  {
    const at::Tensor tensor = torch::ones({1 << 20});
    EXPECT_EQ(memory_use().in_use_bytes - before, 4 << 20);
    EXPECT_GE(memory_use().peak_bytes, 4 << 20);
    EXPECT_GT(memory_use().limit_bytes, 4 << 20);
  }
  EXPECT_EQ(memory_use().in_use_bytes, before);
  EXPECT_GE(memory_use().cached_bytes, 4 << 20);
  release_memory();
  EXPECT_EQ(memory_use().cached_bytes, 0);
  EXPECT_GE(memory_use().returned_bytes, 4 << 20);
  shutdown();
}

TEST(CpuAllocatorMpiTest, AChildHasItsOwnTensorsWhileTheParentTrainsOn) {
  init();
  at::set_num_threads(1);
  at::Tensor weight = torch::ones({100000});
  int go[2];
  ASSERT_EQ(pipe(go), 0);
  const pid_t process = fork();
  if (process == 0) {
    alarm(30);
    close(go[1]);
    char byte = 0;
    static_cast<void>(!read(go[0], &byte, 1));
    bool right = weight.sum().item<float>() == 100000.0F;
    weight.fill_(9);
    right = right && torch::full({100000}, 2).sum().item<std::int64_t>() == 200000;
    try {
      allreduce(weight);
      right = false;
    } catch (const Error&) {
    }
    _exit(right ? 0 : 1);
  }
  close(go[0]);
  weight.fill_(5);
  EXPECT_EQ(Sum(weight), 500000.0F * static_cast<float>(size()));
  close(go[1]);
  int status = 0;
  EXPECT_EQ(waitpid(process, &status, 0), process);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(weight.sum().item<float>(), 500000.0F);
  EXPECT_EQ(Sum(weight), 500000.0F * static_cast<float>(size()));
  shutdown();
}

}  // namespace
}  // namespace sirtaki::tests
