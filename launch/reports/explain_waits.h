// The flight records of a session tell which calls some ranks have made and others have not. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/trace/flight_record.h"

namespace sirtaki::launch {

using Records = std::map<int, const core::trace::FlightRecord*>;  // by rank

// Records that are older than the last one by more than this are not of the same moment.
constexpr core::Duration kTogether = std::chrono::seconds(5);

// When the last of them was written, by the clock of rank 0.
core::TimePoint LastOf(const Records& records);
// Whether a record tells what the rank had done when the last one was written: it is of then, or
// the rank has done nothing since.
bool IsOfTheEnd(const core::trace::FlightRecord& record, core::TimePoint last);

// A call that some ranks wait in.
struct Wait {
  std::uint32_t set = 0;
  std::string key;
  std::string what;
  bool of_shutdown = false;  // no call of a set: they wait in shutdown()
  core::RankRanges waiting;
  core::RankRanges missing;  // members that have not made the call
  core::RankRanges earlier;  // had not when they wrote their record, which is an earlier one
  core::RankRanges untold;   // members whose record no longer tells
  core::RankRanges unknown;  // members that have left no record
  bool members_known = false;
  std::uint64_t number = 0;  // it was the n-th call of the first of `waiting`
  core::Duration waited{};   // the longest
  std::size_t others = 0;    // more calls between the same ranks

  bool is_complete() const {
    return members_known && missing.empty() && earlier.empty() && untold.empty() && unknown.empty();
  }
};

// The one that has waited longest first; those that every member has called last. `size`: of the
// world.
std::vector<Wait> FindWaits(const Records& records, int size);

// The pair in which each side has not called what the other waits in, and goes no further.
std::optional<std::pair<Wait, Wait>> FindCrossing(const std::vector<Wait>& waits,
                                                  const Records& records);

const core::trace::FlightRecord::Set* FindSet(const core::trace::FlightRecord& record,
                                              std::uint32_t number);
// Null if the record holds none.
const core::trace::Event* LastCall(const core::trace::FlightRecord& record,
                                   std::optional<std::uint32_t> set);

}  // namespace sirtaki::launch
