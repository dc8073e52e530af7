#include "session/base/clock_offset.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "core/base/log.h"
#include "core/base/text.h"

namespace sirtaki::session {

using core::Clock;
using core::Duration;
using core::Status;
using core::TimePoint;

namespace {

// The narrowest of this many counts: most rounds are held up by somebody.
constexpr int kRounds = 10;

// Nothing of ours depends on the time of day. Logs and files of several hosts are hard to put in order
// where it differs by more than that.
constexpr auto kMostSkew = std::chrono::seconds(2);

Duration WallOf(TimePoint now) {
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<Duration>(wall) - now.time_since_epoch();
}

struct Bounds {
  Duration low = Duration::min();
  Duration high = Duration::max();

  // `mine` of this clock, `zeros` of rank 0's host.
  void Add(const ClockReading& mine, const ClockReading& zeros) {
    low = std::max(low, zeros.before - mine.after);
    high = std::min(high, zeros.after - mine.before);
  }
  Duration Middle() const { return low + (high - low) / 2; }
};

// The bytes on the way to the other ranks: before, and the `after` of the round before.
std::string ToBytes(const ClockReading& reading) {
  std::string bytes(sizeof reading, '\0');
  std::memcpy(bytes.data(), &reading, sizeof reading);
  return bytes;
}

Status FromBytes(const std::string& bytes, ClockReading* reading) {
  if (bytes.size() != sizeof *reading) {
    return {core::StatusCode::kProtocol, "a clock reading has the wrong size"};
  }
  std::memcpy(reading, bytes.data(), sizeof *reading);
  return Status::Ok();
}

}  // namespace

Duration EstimateOffset(std::span<const std::vector<ClockReading>> rounds,
                        const core::Topology& topology) {
  const auto host_of = [&](std::size_t rank) { return topology.host_of_rank[rank]; };
  const auto own = static_cast<std::size_t>(topology.rank);
  const int here = host_of(own);
  if (here == host_of(0)) return Duration::zero();
  Bounds together;
  Bounds alone;
  for (const std::vector<ClockReading>& round : rounds) {
    alone.Add(round[own], round[0]);
    for (std::size_t zero = 0; zero < round.size(); ++zero) {
      if (host_of(zero) != host_of(0)) continue;
      for (std::size_t rank = 0; rank < round.size(); ++rank) {
        if (host_of(rank) == here) together.Add(round[rank], round[zero]);
      }
    }
  }
  return together.low <= together.high ? together.Middle() : alone.Middle();
}

Duration EstimateSkew(const std::vector<ClockReading>& round, Duration offset,
                      const core::Topology& topology) {
  return round[static_cast<std::size_t>(topology.rank)].wall - round[0].wall - offset;
}

std::string SkewText(Duration skew, const core::Topology& topology) {
  if (std::chrono::abs(skew) < kMostSkew) return {};
  return "the clock of host " + topology.host + " is " +
         core::DurationText(std::chrono::abs(skew)) +
         (skew > Duration::zero() ? " ahead of" : " behind") + " that of host " +
         topology.host_names[0] +
         " (rank 0), so times in logs and files differ; the job goes on; let NTP set both "
         "(chronyc makestep, or timedatectl set-ntp true)";
}

Status MeasureOffset(Medium& medium, TimePoint deadline, Duration* offset) {
  *offset = Duration::zero();
  const core::Topology& topology = medium.topology();
  if (topology.host_names.size() < 2) return Status::Ok();
  std::vector<std::vector<ClockReading>> rounds;
  std::vector<std::string> told;
  TimePoint after{};
  for (int i = 0; i <= kRounds; ++i) {
    const TimePoint now = Clock::now();
    const ClockReading mine{now, after, WallOf(now)};
    Status status = medium.Exchange(ToBytes(mine), deadline, &told);
    after = Clock::now();
    std::vector<ClockReading>& round = rounds.emplace_back(told.size());
    for (std::size_t rank = 0; status.ok() && rank < told.size(); ++rank) {
      status = FromBytes(told[rank], &round[rank]);
      if (i > 0) rounds[rounds.size() - 2][rank].after = round[rank].after;
    }
    if (!status.ok()) return status;
  }
  rounds.pop_back();  // when it was over nobody has told
  *offset = EstimateOffset(rounds, topology);
  if (topology.local_rank == 0) {
    const std::string text = SkewText(EstimateSkew(rounds[0], *offset, topology), topology);
    if (!text.empty()) SIRTAKI_LOG(kWarning, text);
  }
  return Status::Ok();
}

}  // namespace sirtaki::session
