// Random programs of collectives on overlapping sets, on threads: 2000 of them, in four parts so
// that they run side by side. A failure prints its seed; SIRTAKI_TEST_SEED runs that one first.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "session/inproc/inproc_world.h"
#include "tests/support/order_cycle.h"
#include "tests/support/random_program.h"
#include "tests/support/rank_threads.h"
#include "tests/support/session_calls.h"
#include "tests/support/test_scale.h"

namespace sirtaki::tests {
namespace {

using Sharing = session::InprocWorld::Sharing;

std::string RunOnThreads(std::uint64_t seed, Sharing sharing) {
  const RandomProgram program(seed);
  const auto world = std::make_shared<session::InprocWorld>(program.size, program.host_of_rank);
  world->Share(sharing);
  std::vector<StartedGroups> started(static_cast<std::size_t>(program.size),
                                     StartedGroups(program));
  std::vector<std::string> problems(static_cast<std::size_t>(program.size));
  RankThreads::Run(program.size, [&](int rank) {
    const auto here = static_cast<std::size_t>(rank);
    session::StartOptions options = SessionOptions([&](core::Config& config) {
      config.small_bytes = program.small_bytes;
      config.fusion_bytes = program.fusion_bytes;
    });
    options.on_start = [&](const core::RunBatch& batch) { started[here].Note(batch); };
    std::shared_ptr<session::Session> session;
    const core::Status status = session::Session::CreateInproc(world, rank, options, &session);
    if (!status.ok()) {
      problems[here] = status.ToString();
      return;
    }
    problems[here] = RunRandomProgram(program, *session, seed);
    const core::Status end = session->Shutdown("the program is over");
    if (!end.ok()) problems[here] += "\n  " + end.ToString();
  });
  std::string text;
  for (const std::string& problem : problems) text += problem;
  std::vector<std::vector<std::string>> orders;
  for (const StartedGroups& groups : started) orders.push_back(groups.names());
  return text + CycleOf(orders);
}

class RandomProgramsTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Parts, RandomProgramsTest, ::testing::Range(0, 4));

TEST_P(RandomProgramsTest, GiveWhatNaiveLoopsGiveInAnOrderWithoutCycles) {
  const std::uint64_t first = tests::TestSeed();
  const int count = tests::ScaledCount(500, 5000);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    ASSERT_EQ(RunOnThreads(seed, Sharing::kNone), "") << "again with SIRTAKI_TEST_SEED=" << seed;
  }
}

TEST(RandomSharedProgramsTest, GiveWhatNaiveLoopsGiveInAnOrderWithoutCycles) {
  const std::uint64_t first = tests::TestSeed();
  const int count = tests::ScaledCount(200, 5000);
  for (int i = 0; i < count; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    const Sharing sharing = seed % 2 == 0 ? Sharing::kDirect : Sharing::kStaged;
    ASSERT_EQ(RunOnThreads(seed, sharing), "") << "again with SIRTAKI_TEST_SEED=" << seed;
  }
}

TEST(CycleOfTest, FindsACycleAndOnlyThat) {
  EXPECT_EQ(CycleOf({{"a", "b", "c"}, {"a", "c"}, {"b", "d"}}), "");
  EXPECT_NE(CycleOf({{"a", "b"}, {"b", "c"}, {"c", "a"}}), "");
}

}  // namespace
}  // namespace sirtaki::tests
