// Nothing waits for ever in shared memory: who is told to stop does, and who has died is noticed.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ops/shm/backend.h"
#include "ops/shm/blocks.h"
#include "ops/shm/operations.h"
#include "tests/support/shm_ranks.h"

namespace sirtaki::ops::shm {
namespace {

using core::DType;
using core::ReduceOp;
using core::Status;
using core::StatusCode;
using tests::ShmRanks;

constexpr Channel kSmall{core::kWorldSet, fusion::Lane::kSmall};
constexpr Channel kLarge{core::kWorldSet, fusion::Lane::kLarge};

TEST(ShmBackendFailureTest, AbortEndsWhatBlocksAndWhatIsPolledAndWhatComes) {
  for (const bool spin : {false, true}) {
    ShmRanks ranks(2);
    Backend backend(ranks.group(0), {.spin = spin});
    const Backend peer(ranks.group(1), {.spin = spin});
    const Status why(StatusCode::kPeerLost, "rank 1 is gone");
    std::atomic<bool> started{false};
    Status seen;
    float value = 1;
    std::thread blocked([&] {
      started = true;
      seen = backend.AllReduce(kLarge, &value, 1, DType::kF32, ReduceOp::kSum, {})->status();
    });
    float other = 1;
    const auto polled = backend.AllReduce(kSmall, &other, 1, DType::kF32, ReduceOp::kSum, {});
    EXPECT_FALSE(polled->Poll());
    while (!started) std::this_thread::yield();
    backend.Abort(why);
    backend.Abort({StatusCode::kAborted, "later"});
    blocked.join();
    EXPECT_EQ(seen, why);
    EXPECT_TRUE(polled->Poll());
    EXPECT_EQ(polled->status(), why);
    EXPECT_EQ(backend.AllReduce(kSmall, &other, 1, DType::kF32, ReduceOp::kSum, {})->status(), why);
    EXPECT_EQ(backend.AddSet(3, {0}), why);
    EXPECT_EQ(other, 1);
  }
}

// Who has given up may change its tensors, which the others read where they lie.
TEST(ShmBackendFailureTest, NothingEndsWellWithTheTensorsOfWhoHasGivenUp) {
  const Status why(StatusCode::kAborted, "rank 1 has given up");
  ShmRanks ranks(2);
  Backend backend(ranks.group(0), {.spin = false});
  std::vector<float> mine(1000, 1);
  Status seen;
  // Rank 1 goes step by step, and gives up in the middle.
  Blocks blocks(ranks.group(1));
  EXPECT_TRUE(blocks.Make(core::kWorldSet).ok());
  SharedChannel channel(ranks.group(1), blocks, {0, 1}, {.lane = fusion::Lane::kLarge},
                        std::make_shared<StopSign>());
  std::vector<float> theirs(1000, 2);
  Turn turn(channel);
  Steps steps = ReduceSegments(turn, {{theirs.data(), theirs.data(), 1000}}, {});
  Wait last;
  // Rank 0 begins when rank 1 waits for it: it must not be through before rank 1 gives up.
  steps.Resume();
  ASSERT_FALSE(steps.done());
  std::thread reducing([&] {
    seen = backend.AllReduce(kLarge, mine.data(), 1000, DType::kF32, ReduceOp::kSum, {})->status();
  });
  for (; !steps.done(); steps.Resume()) {
    last = steps.wait();
    EXPECT_TRUE(channel.Block(last, /*spin=*/false).ok());
    ranks.group(1).GiveUp();
  }
  // The operation is through on both sides: all have read what the last frame brings.
  last.what = Wait::For::kRoom;
  EXPECT_TRUE(channel.Block(last, /*spin=*/false).ok());
  backend.Abort(why);
  reducing.join();
  EXPECT_EQ(seen, why);
}

TEST(ShmBackendFailureTest, AbortEndsAWaitForMembersOfASet) {
  ShmRanks ranks(2);
  Backend backend(ranks.group(0), {.spin = false});
  const Status why(StatusCode::kAborted, "enough");
  Status seen;
  std::thread waiting([&] { seen = backend.AddSet(1, {0, 1}); });
  backend.Abort(why);
  waiting.join();
  EXPECT_EQ(seen, why);
}

TEST(ShmBackendFailureTest, VerifyNoticesWhatHasChangedInSharedMemory) {
  ShmRanks ranks(2);
  Backend backend(ranks.group(0), {.spin = false, .verify = true});
  Backend peer(ranks.group(1), {.spin = false, .verify = true});
  std::vector<float> theirs(100, 1234.5F);
  const auto sum = peer.AllReduce(kSmall, theirs.data(), 100, DType::kF32, ReduceOp::kSum, {});
  EXPECT_FALSE(sum->Poll());
  // The frame: a byte for each segment, which is padded to 16, then the values.
  const std::int64_t ring = Blocks(ranks.group(0)).Find(1, core::kWorldSet)->rings[0];
  auto* const shown = reinterpret_cast<float*>(ranks.group(0).SessionMemory(1) + ring + 16);
  ASSERT_EQ(shown[99], 1234.5F);
  shown[99] = 1;
  std::vector<float> mine(100, 1);
  const auto seen = backend.AllReduce(kSmall, mine.data(), 100, DType::kF32, ReduceOp::kSum, {});
  ASSERT_TRUE(seen->Poll());
  EXPECT_EQ(seen->status().code(), StatusCode::kBackend);
  EXPECT_NE(seen->status().message().find(
                "of what rank 1 wrote to shared memory are not what rank 0 reads"),
            std::string::npos)
      << seen->status().message();
}

void WriteWhole(int to, const std::string& text) {
  ASSERT_EQ(write(to, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

std::string ReadWhole(int from, std::size_t size) {
  std::string text(size, '\0');
  std::size_t done = 0;
  while (done < size) {
    const ssize_t n = read(from, text.data() + done, size - done);
    if (n <= 0) break;
    done += static_cast<std::size_t>(n);
  }
  return text;
}

// The other process: joins the group, takes part in one sum, and is gone.
[[noreturn]] void BePeer(int from, int to, std::size_t announcement_bytes) {
  LocalGroupOptions options;
  options.rank = 1;
  std::unique_ptr<LocalGroup> group;
  std::string mine;
  int failures = LocalGroup::Make(options, &group, &mine).ok() ? 0 : 1;
  WriteWhole(to, mine);
  const std::vector<std::string> all = {ReadWhole(from, announcement_bytes), mine};
  if (!group->Join({0, 1}, all).ok()) ++failures;
  Backend backend(*group, {.spin = false});
  std::vector<float> values(100000, 2);
  const auto sum =
      backend.AllReduce(kLarge, values.data(), 100000, DType::kF32, ReduceOp::kSum, {});
  for (const float value : values) failures += value == 3 ? 0 : 1;
  _exit(sum->status().ok() && failures == 0 ? 7 : 1);
}

// An engine looks at the peers as well, but its round may hang: nobody aborts the backend here.
TEST(ShmBackendFailureTest, AProcessThatEndsIsNoticed) {
  LocalGroupOptions options;
  std::unique_ptr<LocalGroup> group;
  std::string mine;
  ASSERT_TRUE(LocalGroup::Make(options, &group, &mine).ok());
  std::array<int, 2> down{};
  std::array<int, 2> up{};
  ASSERT_EQ(pipe(down.data()), 0);
  ASSERT_EQ(pipe(up.data()), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) BePeer(down[0], up[1], mine.size());
  WriteWhole(down[1], mine);
  ASSERT_TRUE(
      group->Join({0, 1}, std::vector<std::string>{mine, ReadWhole(up[0], mine.size())}).ok());
  Backend backend(*group, {.spin = false});
  std::vector<float> values(100000, 1);
  ASSERT_TRUE(backend.AllReduce(kLarge, values.data(), 100000, DType::kF32, ReduceOp::kSum, {})
                  ->status()
                  .ok());
  EXPECT_EQ(values.back(), 3);
  const auto lost =
      backend.AllReduce(kLarge, values.data(), 100000, DType::kF32, ReduceOp::kSum, {});
  EXPECT_EQ(lost->status().code(), StatusCode::kPeerLost) << lost->status().ToString();
  int how = 0;
  EXPECT_EQ(waitpid(child, &how, 0), child);
  EXPECT_TRUE(WIFEXITED(how) && WEXITSTATUS(how) == 7);
  for (const int end : {down[0], down[1], up[0], up[1]}) close(end);
}

}  // namespace
}  // namespace sirtaki::ops::shm
