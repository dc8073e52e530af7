#include "ops/shm/region.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "tests/support/forked_child.h"

namespace sirtaki::ops::shm {
namespace {

constexpr std::int64_t kBytes = 64 * 1024;

std::shared_ptr<Region> Make() {
  std::shared_ptr<Region> region;
  const core::Status status = Region::Create("sirtaki test", kBytes, &region);
  EXPECT_TRUE(status.ok()) << status.message();
  return region;
}

TEST(RegionTest, OthersSeeWhatIsWritten) {
  const auto region = Make();
  std::memset(region->base(), 3, kBytes);
  const pid_t owner = getpid();
  EXPECT_EQ(tests::InChild([&] {
              std::shared_ptr<Region> opened;
              if (!Region::Open(owner, region->descriptor(), kBytes, &opened).ok()) return 1;
              if (opened->base()[kBytes - 1] != std::byte{3}) return 2;
              opened->base()[5] = std::byte{4};
              opened->Discard(0, kBytes);  // not the owner
              return opened->base()[6] == std::byte{3} ? 0 : 3;
            }),
            0);
  EXPECT_EQ(region->base()[5], std::byte{4});
}

// It would keep the memory of a rank that has died.
TEST(RegionTest, AForkedChildDoesNotHaveWhatItsParentHasOpened) {
  const auto region = Make();
  const pid_t owner = getpid();
  EXPECT_EQ(tests::InChild([&] {
              std::shared_ptr<Region> opened;
              if (!Region::Open(owner, region->descriptor(), kBytes, &opened).ok()) return 1;
              return tests::InChild([&] {
                void* const there = mmap(opened->base(), kBytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
                if (there != opened->base()) return 2;
                opened.reset();  // leaves alone what lies there now
                *static_cast<volatile char*>(there) = 1;
                return 0;
              });
            }),
            0);
}

TEST(RegionTest, WhatIsDiscardedReadsAsZeroes) {
  const auto region = Make();
  std::memset(region->base(), 3, kBytes);
  region->Discard(4096 - 1, 2 * 4096);  // one whole page lies within
  EXPECT_EQ(region->base()[4095], std::byte{3});
  EXPECT_EQ(region->base()[4096], std::byte{0});
  EXPECT_EQ(region->base()[8191], std::byte{0});
  EXPECT_EQ(region->base()[8192], std::byte{3});
}

TEST(RegionTest, AForkedChildDiscardsNothingOfItsParents) {
  const auto region = Make();
  std::memset(region->base(), 3, kBytes);
  EXPECT_EQ(tests::InChild([&] {
              region->Discard(0, kBytes);
              return 0;
            }),
            0);
  EXPECT_EQ(region->base()[0], std::byte{3});
}

TEST(RegionTest, AnotherProgramsDescriptorIsNotOpened) {
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  const int plain = memfd_create("something else", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(plain, kBytes), 0);
  const pid_t owner = getpid();
  for (const int descriptor : {pipes[0], plain}) {
    EXPECT_EQ(tests::InChild([&] {
                std::shared_ptr<Region> opened;
                const core::Status status = Region::Open(owner, descriptor, kBytes, &opened);
                return status.code() == core::StatusCode::kUnsupported && opened == nullptr ? 0 : 1;
              }),
              0);
  }
  for (const int descriptor : {pipes[0], pipes[1], plain}) close(descriptor);
}

TEST(RegionTest, AClosedDescriptorAProcessThatIsNotThereAndAnotherSizeAreErrors) {
  auto region = Make();
  const pid_t owner = getpid();
  const int descriptor = region->descriptor();
  const auto open = [&](pid_t process, int number, std::int64_t bytes) {
    return tests::InChild([&] {
      std::shared_ptr<Region> opened;
      const core::Status status = Region::Open(process, number, bytes, &opened);
      return status.code() == core::StatusCode::kUnsupported && !status.message().empty() ? 0 : 1;
    });
  };
  EXPECT_EQ(open(owner, descriptor, 2 * kBytes), 0);
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  ASSERT_EQ(waitpid(gone, nullptr, 0), gone);
  EXPECT_EQ(open(gone, descriptor, kBytes), 0);
  region.reset();
  EXPECT_EQ(open(owner, descriptor, kBytes), 0);
  std::shared_ptr<Region> own;
  EXPECT_FALSE(Region::Open(owner, descriptor, kBytes, &own).ok());
}

TEST(RegionTest, TooFewAddressesAreAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer needs more addresses itself";
#endif
  EXPECT_EQ(tests::InChild([] {
              const rlimit limit{std::size_t{4} << 30, std::size_t{4} << 30};
              if (setrlimit(RLIMIT_AS, &limit) != 0) return 1;
              std::shared_ptr<Region> region;
              const core::Status status =
                  Region::Create("sirtaki test", std::int64_t{8} << 30, &region);
              return status.code() == core::StatusCode::kUnsupported ? 0 : 2;
            }),
            0);
}

TEST(RegionTest, ALimitOfFilesIsAnError) {
  EXPECT_EQ(tests::InChild([] {
              const rlimit limit{1 << 20, 1 << 20};
              if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
              std::shared_ptr<Region> region;
              const core::Status status = Region::Create("sirtaki test", 2 << 20, &region);
              return status.code() == core::StatusCode::kUnsupported ? 0 : 2;
            }),
            0);
}

TEST(RegionTest, NothingStaysWhenItsProcessIsKilled) {
  // The only file is anonymous: what the child made is gone with it, also when it is killed.
  int told[2];
  ASSERT_EQ(pipe(told), 0);
  const pid_t process = fork();
  if (process == 0) {
    std::shared_ptr<Region> region;
    if (!Region::Create("sirtaki test", kBytes, &region).ok()) _exit(1);
    const int descriptor = region->descriptor();
    if (write(told[1], &descriptor, sizeof descriptor) != sizeof descriptor) _exit(2);
    for (;;) pause();
  }
  int descriptor = -1;
  ASSERT_EQ(read(told[0], &descriptor, sizeof descriptor), static_cast<ssize_t>(sizeof descriptor));
  std::shared_ptr<Region> opened;
  const core::Status status = Region::Open(process, descriptor, kBytes, &opened);
  ASSERT_TRUE(status.ok()) << status.message();
  opened->base()[0] = std::byte{1};
  kill(process, SIGKILL);
  ASSERT_EQ(waitpid(process, nullptr, 0), process);
  EXPECT_EQ(opened->base()[0], std::byte{1});  // who has mapped it keeps it
  std::shared_ptr<Region> again;
  EXPECT_FALSE(Region::Open(process, descriptor, kBytes, &again).ok());
  close(told[0]);
  close(told[1]);
}

}  // namespace
}  // namespace sirtaki::ops::shm
