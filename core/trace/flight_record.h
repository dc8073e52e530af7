// A rank leaves a flight record behind when something has gone wrong: what it waited for, what it
// ran, and the last things that it did. A file of JSON for each rank; whoever has those of all
// ranks can say who was behind (launch/reports/explain). Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/trace/event.h"

namespace sirtaki::core::trace {

struct FlightRecord {
  // A process set of which the rank is a member.
  struct Set {
    std::uint32_t number = 0;
    RankRanges members;
    std::uint64_t submitted = 0;  // calls of this rank in it, up to now
    bool joined = false;
  };
  // A call that this rank has made and that the ranks have not agreed on.
  struct Pending {
    std::uint32_t set = 0;
    std::string key;           // as texts have it: "\"w\"", "unnamed call #7"
    std::string what;          // "all-reduce(sum) of float32 [3, 4]"; of a group how many tensors
    std::uint64_t number = 0;  // it was the n-th call of its set here, from 1
    TimePoint since{};
  };
  // An operation is on its way through the lanes.
  struct Running {
    std::uint32_t set = 0;
    std::string what;
    TimePoint since{};
  };

  int rank = 0;
  int size = 1;
  std::string host;
  std::int64_t pid = 0;
  std::string version;               // of the library
  std::string session;               // the same on all ranks of a job
  std::string why;                   // it was written
  std::string missing;               // what the writer could not get at, and why; mostly empty
  std::string doing;                 // what the program is in the middle of, if that is known
  Status fault;                      // of the group; ok while there is none
  std::int64_t unix_us = 0;          // when it was written
  TimePoint now{};                   // the same, by the clock of the times here
  Duration offset{};                 // added to that clock gives rank 0's
  std::optional<TimePoint> leaving;  // it waits in shutdown() since then
  std::vector<Set> sets;
  std::vector<Pending> pending;
  std::vector<Running> running;
  std::vector<Event> events;  // oldest first
  std::uint64_t lost = 0;     // events before these
};

std::string FlightRecordToJson(const FlightRecord& record);

// kInvalidArgument, with what is wrong and where, if it is none. Whatever stands in the text: of a
// record that is accepted ranks are within its size, which is bounded, and times and offsets may be
// added and subtracted. Its texts are as they were: who prints them escapes them.
Status FlightRecordFromJson(std::string_view text, FlightRecord* record);

}  // namespace sirtaki::core::trace
