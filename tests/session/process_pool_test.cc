#include "session/base/process_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <memory>

namespace sirtaki::session {
namespace {

constexpr std::int64_t kGi = std::int64_t{1} << 30;

TEST(ProcessPoolTest, ARankHasItsShareOfTheHost) {
  EXPECT_EQ(SizeOfPool(0, 64 * kGi, 0, 4).bytes, 16 * kGi);
  EXPECT_EQ(SizeOfPool(0, 64 * kGi, 0, 4).address_bytes, 64 * kGi);
  EXPECT_EQ(SizeOfPool(2 * kGi, 64 * kGi, 0, 4).bytes, 2 * kGi);
}

TEST(ProcessPoolTest, LeavesMostOfLimitedAddressesToOthers) {
  const ops::shm::PoolOptions options = SizeOfPool(0, 64 * kGi, 32 * kGi, 4);
  EXPECT_EQ(options.address_bytes, 2 * kGi);
  EXPECT_EQ(options.bytes, 2 * kGi);
}

TEST(ProcessPoolTest, OneForTheProcess) {
  core::Config config;
  config.pool_bytes = kGi / 4;
  const auto pool = PoolOfProcess(config, 1);
  ASSERT_NE(pool, nullptr);
  config.pool_bytes = kGi;
  EXPECT_EQ(PoolOfProcess(config, 2), pool);
  EXPECT_EQ(pool->Use().limit_bytes, kGi) << "a second session may have another limit";
  config.pool_bytes = 64 * kGi;
  EXPECT_EQ(PoolOfProcess(config, 2), pool);
  EXPECT_EQ(pool->Use().limit_bytes, kGi) << "and no more addresses";
  config.pool_bytes = kGi / 4;
  EXPECT_NE(PrivatePoolOfProcess(config, 1), pool);
  config.shared_memory = core::SharedMemoryMode::kOff;
  EXPECT_EQ(PoolOfProcess(config, 1), nullptr);
}

TEST(ProcessPoolTest, IsMadeWhereAddressesAreFew) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer needs more addresses itself";
#endif
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{std::size_t{8} << 30, std::size_t{8} << 30};
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    const ops::shm::PoolOptions options = SizeOfPool(0, 1024 * kGi, 8 * kGi, 2);
    std::shared_ptr<ops::shm::Pool> pool;
    if (!ops::shm::Pool::Make(options, &pool).ok()) _exit(3);
    _exit(pool->TryAllocate(kGi / 2) != nullptr ? 0 : 4);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(ProcessPoolTest, WithoutAddressesThereIsNone) {
  ops::shm::PoolOptions options;
  options.bytes = std::int64_t{1} << 60;
  std::shared_ptr<ops::shm::Pool> pool;
  const core::Status status = ops::shm::Pool::Make(options, &pool);
  EXPECT_EQ(status.code(), core::StatusCode::kUnsupported);
  EXPECT_EQ(pool, nullptr);
}

}  // namespace
}  // namespace sirtaki::session
