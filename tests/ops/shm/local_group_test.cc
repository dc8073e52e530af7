#include "ops/shm/local_group.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace sirtaki::ops::shm {
namespace {

using core::RankRanges;
using core::Status;
using core::StatusCode;

struct Rank {
  std::unique_ptr<LocalGroup> group;
  std::string announcement;
};

Rank MakeRank(int rank, std::shared_ptr<Pool> pool = nullptr, bool threads_share_all = true) {
  LocalGroupOptions options;
  options.rank = rank;
  options.pool = std::move(pool);
  options.threads_share_all = threads_share_all;
  Rank made;
  const Status status = LocalGroup::Make(options, &made.group, &made.announcement);
  EXPECT_TRUE(status.ok()) << status.message();
  return made;
}

std::shared_ptr<Pool> MakePool() {
  std::shared_ptr<Pool> pool;
  EXPECT_TRUE(Pool::Make({.bytes = std::int64_t{1} << 20}, &pool).ok());
  return pool;
}

TEST(LocalGroupTest, ThreadsSeeEachOthersSessionMemoryAndAllOfTheRest) {
  constexpr int kRanks = 5;
  std::vector<Rank> ranks;
  std::vector<std::string> announcements;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(MakeRank(rank + 3));
    announcements.push_back(ranks.back().announcement);
  }
  int own = 7;
  for (int i = 0; i < kRanks; ++i) {
    LocalGroup& group = *ranks[static_cast<std::size_t>(i)].group;
    ASSERT_TRUE(group.Join(RankRanges::Span(3, 3 + kRanks - 1), announcements).ok());
    EXPECT_EQ(group.size(), kRanks);
    EXPECT_EQ(group.self(), i);
    EXPECT_EQ(group.IndexOf(3 + i), i);
    EXPECT_EQ(group.IndexOf(2), -1);
    EXPECT_EQ(group.At(0, group.OffsetOf(&own)), reinterpret_cast<std::byte*>(&own));
    EXPECT_TRUE(group.CheckPeers().ok());
  }
  for (int i = 0; i < kRanks; ++i) {
    EXPECT_EQ(ranks[0].group->SessionMemory(i), ranks[1].group->SessionMemory(i));
  }
}

TEST(LocalGroupTest, OnlyPoolMemoryIsSeenWhereThreadsActAsProcesses) {
  const auto pool = MakePool();
  Rank one = MakeRank(0, pool, false);
  Rank other = MakeRank(1, nullptr, false);
  const std::vector<std::string> both = {one.announcement, other.announcement};
  ASSERT_TRUE(one.group->Join(RankRanges::Span(0, 1), both).ok());
  ASSERT_TRUE(other.group->Join(RankRanges::Span(0, 1), both).ok());
  const std::shared_ptr<void> shared = one.group->memory().Allocate(100);
  EXPECT_EQ(other.group->At(0, one.group->OffsetOf(shared.get())), shared.get());
  int own = 7;
  EXPECT_EQ(one.group->OffsetOf(&own), -1);
  EXPECT_EQ(other.group->OffsetOf(other.group->memory().Allocate(100).get()), -1);
}

TEST(LocalGroupTest, AnotherJobsTokenIsRefusedNamingTheRank) {
  Rank one = MakeRank(0);
  Rank other = MakeRank(1);
  std::string wrong = other.announcement;
  wrong[0] = static_cast<char>(wrong[0] ^ 1);
  const Status status =
      one.group->Join(RankRanges::Span(0, 1), std::vector{one.announcement, wrong});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
}

TEST(LocalGroupTest, AnAnnouncementThatIsDamagedOrOfAnotherProgramIsRefused) {
  Rank one = MakeRank(0);
  Rank other = MakeRank(1);
  const auto refused = [&](const std::string& announcement) {
    Rank fresh = MakeRank(0);
    const Status status =
        fresh.group->Join(RankRanges::Span(0, 1), std::vector{fresh.announcement, announcement});
    return status.code() == StatusCode::kUnsupported;
  };
  for (std::size_t length = 0; length < other.announcement.size(); ++length) {
    EXPECT_TRUE(refused(other.announcement.substr(0, length))) << length;
  }
  std::string wrong = other.announcement;
  const std::uint64_t process = static_cast<std::uint64_t>(getppid());
  std::memcpy(wrong.data() + 8, &process, sizeof process);
  EXPECT_TRUE(refused(wrong));
}

// A rank in another process: it joins, writes to the first one's pool memory and session memory,
// and waits to be killed.
[[noreturn]] void OtherProcess(const std::string& first, std::int64_t offset, int tell) {
  alarm(60);
  Rank mine = MakeRank(1, MakePool());
  const Status status =
      mine.group->Join(RankRanges::Span(0, 1), std::vector{first, mine.announcement});
  if (!status.ok()) _exit(1);
  *mine.group->At(0, offset) = std::byte{42};
  mine.group->SessionMemory(0)[LocalGroup::kChannelsBegin] = std::byte{43};
  const auto length = static_cast<ssize_t>(mine.announcement.size());
  if (write(tell, mine.announcement.data(), mine.announcement.size()) != length) _exit(2);
  for (;;) pause();
}

TEST(LocalGroupTest, ProcessesSeeEachOtherAndNoticeAnEnd) {
  const auto pool = MakePool();
  Rank mine = MakeRank(0, pool);
  auto* const block = static_cast<std::byte*>(pool->TryAllocate(4096));
  const std::int64_t offset = pool->OffsetOf(block);
  int told[2];
  ASSERT_EQ(pipe(told), 0);
  // The child maps this process's memory anew: its own view of the pool is a copy.
  const pid_t process = fork();
  if (process == 0) OtherProcess(mine.announcement, offset, told[1]);
  std::string theirs(mine.announcement.size(), '\0');
  ASSERT_EQ(read(told[0], theirs.data(), theirs.size()), static_cast<ssize_t>(theirs.size()));
  ASSERT_TRUE(
      mine.group->Join(RankRanges::Span(0, 1), std::vector{mine.announcement, theirs}).ok());
  EXPECT_EQ(block[0], std::byte{42});
  EXPECT_EQ(mine.group->SessionMemory(0)[LocalGroup::kChannelsBegin], std::byte{43});
  EXPECT_TRUE(mine.group->CheckPeers().ok());
  kill(process, SIGKILL);
  ASSERT_EQ(waitpid(process, nullptr, 0), process);
  const Status status = mine.group->CheckPeers();
  EXPECT_EQ(status.code(), StatusCode::kPeerLost);
  EXPECT_NE(status.message().find("rank 1"), std::string::npos) << status.message();
  mine.group->SessionMemory(1)[0] = std::byte{1};  // stays mapped
  close(told[0]);
  close(told[1]);
}

}  // namespace
}  // namespace sirtaki::ops::shm
