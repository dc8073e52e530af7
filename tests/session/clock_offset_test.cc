#include "session/base/clock_offset.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "session/session_observability.h"
#include "tests/support/rank_threads.h"
#include "tests/support/session_calls.h"

namespace sirtaki::session {
namespace {

using core::Duration;
using core::TimePoint;
using std::chrono::microseconds;
using std::chrono::seconds;

core::Topology TopologyOf(int rank, std::vector<int> host_of_rank) {
  core::Topology topology;
  topology.rank = rank;
  topology.size = static_cast<int>(host_of_rank.size());
  topology.host_of_rank = std::move(host_of_rank);
  return topology;
}

// Exchanges between ranks whose clocks are ahead of true time, each held up by chance.
class Exchanges {
 public:
  Exchanges(std::vector<Duration> ahead, unsigned seed) : ahead_(std::move(ahead)), random_(seed) {}

  std::vector<ClockReading> Next() {
    std::uniform_int_distribution<int> delay(0, 1000);
    std::vector<TimePoint> begun;
    TimePoint last{};
    for (std::size_t rank = 0; rank < ahead_.size(); ++rank) {
      begun.push_back(now_ + microseconds(delay(random_)));
      last = std::max(last, begun.back());
    }
    std::vector<ClockReading> round;
    for (std::size_t rank = 0; rank < ahead_.size(); ++rank) {
      const TimePoint over = last + microseconds(delay(random_));
      round.push_back({begun[rank] + ahead_[rank], over + ahead_[rank]});
      now_ = std::max(now_, over);
    }
    return round;
  }

 private:
  const std::vector<Duration> ahead_;
  std::mt19937 random_;
  TimePoint now_{seconds(1000)};
};

TEST(ClockOffsetTest, IsFoundToWithinAFractionOfTheDelays) {
  const std::vector<Duration> ahead = {seconds(5), seconds(5), seconds(-300), seconds(-300)};
  for (unsigned seed = 0; seed < 20; ++seed) {
    Exchanges exchanges(ahead, seed);
    std::vector<std::vector<ClockReading>> rounds;
    for (int i = 0; i < 10; ++i) rounds.push_back(exchanges.Next());
    const Duration two = EstimateOffset(rounds, TopologyOf(2, {0, 0, 1, 1}));
    EXPECT_LT(std::chrono::abs(two - seconds(305)), microseconds(500)) << seed;
    // The ranks of a host do not differ at all.
    EXPECT_EQ(EstimateOffset(rounds, TopologyOf(3, {0, 0, 1, 1})), two);
    EXPECT_EQ(EstimateOffset(rounds, TopologyOf(1, {0, 0, 1, 1})), Duration::zero());
  }
}

TEST(ClockOffsetTest, RanksOfAHostWhoseClocksDifferCountForThemselves) {
  Exchanges exchanges({seconds(0), seconds(10), seconds(20)}, 1);
  std::vector<std::vector<ClockReading>> rounds;
  for (int i = 0; i < 10; ++i) rounds.push_back(exchanges.Next());
  const Duration one = EstimateOffset(rounds, TopologyOf(1, {0, 1, 1}));
  const Duration two = EstimateOffset(rounds, TopologyOf(2, {0, 1, 1}));
  EXPECT_LT(std::chrono::abs(one + seconds(10)), microseconds(1000));
  EXPECT_LT(std::chrono::abs(two + seconds(20)), microseconds(1000));
}

// The clocks that only count begin anywhere; the times of day are to agree.
TEST(ClockOffsetTest, ATimeOfDayThatDiffersIsToldWithTheCure) {
  core::Topology topology = TopologyOf(1, {0, 1});
  topology.host = "b";
  topology.host_names = {"a", "b"};
  std::vector<ClockReading> round(2);
  const TimePoint now{seconds(1000)};
  const Duration today = std::chrono::hours(400'000);
  round[0].wall = today - now.time_since_epoch();
  // Host b has been up for 300 s longer.
  const Duration offset = seconds(-300);
  round[1].wall = today - (now - offset).time_since_epoch();
  EXPECT_EQ(EstimateSkew(round, offset, topology), Duration::zero());
  EXPECT_EQ(SkewText(seconds(1), topology), "");
  round[1].wall -= seconds(37);
  const Duration skew = EstimateSkew(round, offset, topology);
  EXPECT_EQ(skew, seconds(-37));
  EXPECT_EQ(
      SkewText(skew, topology),
      "the clock of host b is 37 s behind that of host a (rank 0), so times in logs and files "
      "differ; the job goes on; let NTP set both (chronyc makestep, or timedatectl set-ntp true)");
  EXPECT_NE(SkewText(-skew, topology).find("is 37 s ahead of that of host a"), std::string::npos);
}

TEST(ClockOffsetTest, ASessionOverSeveralHostsHasOne) {
  const auto world = std::make_shared<InprocWorld>(3, std::vector<int>{0, 1, 1});
  std::array<Duration, 3> offsets{};
  const TimePoint begun = core::Clock::now();
  tests::RankThreads::Run(3, [&](int rank) {
    std::shared_ptr<Session> session;
    ASSERT_TRUE(Session::CreateInproc(world, rank, tests::SessionOptions(), &session).ok());
    offsets[static_cast<std::size_t>(rank)] = session->observation().offset();
    EXPECT_TRUE(session->Shutdown("done").ok());
  });
  EXPECT_EQ(offsets[0], Duration::zero());
  EXPECT_EQ(offsets[1], offsets[2]);
  // It is one clock, and an exchange may take that long.
  EXPECT_LT(std::chrono::abs(offsets[1]), core::Clock::now() - begun);
}

}  // namespace
}  // namespace sirtaki::session
