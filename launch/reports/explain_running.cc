#include "launch/reports/explain_running.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "core/protocol/mismatch.h"
#include "launch/reports/explain_calls.h"

namespace sirtaki::launch {
namespace {

using core::DurationText;
using core::RanksText;

constexpr std::size_t kMostTold = 6;

// Operations that a lane takes in turn, as it names them; sends and receives are in no lane.
bool IsOfALane(const std::string& what) {
  return what.ends_with(" lane)") || what.find(" (GPU slot ") != std::string::npos;
}

// An operation that waits in a call of NCCL is named with it: "(GPU slot 0, in ncclAllReduce)".
std::string WithoutCall(std::string what) {
  const std::size_t call = what.rfind(", in nccl");
  if (call != std::string::npos) what.erase(call, what.find(')', call) - call);
  return what;
}

// Begun holds what a rank's lanes have begun, as events name it, with the time.
class Begun {
 public:
  explicit Begun(const FlightRecord& record) {
    std::map<std::tuple<core::trace::Track, std::uint32_t, std::uint64_t>, const Event*> open;
    for (const Event& event : record.events) {
      const auto number = std::make_tuple(event.track, event.thread, event.number);
      if (event.kind == EventKind::kBegin) open[number] = &event;
      if (event.kind == EventKind::kFinish) open.erase(number);
    }
    for (const auto& [number, event] : open)
      begun_.insert({Name(event->set, event->text()), event});
  }

  // Null if it has not begun, or that is no longer in the record. Each is given once.
  const Event* Take(const FlightRecord::Running& running) {
    Event cut;
    cut.SetText(WithoutCall(running.what));
    const auto found = begun_.find(Name(running.set, cut.text()));
    if (found == begun_.end()) return nullptr;
    const Event* event = found->second;
    begun_.erase(found);
    return event;
  }

 private:
  static std::pair<std::uint32_t, std::string> Name(std::uint32_t set, std::string_view text) {
    return {set, core::Escaped(text)};  // as those of the record are
  }

  std::multimap<std::pair<std::uint32_t, std::string>, const Event*> begun_;
};

struct Telling {
  // Operations that have begun, by set and name: the ranks that are in it, and the longest time.
  std::map<std::pair<std::uint32_t, std::string>, std::pair<RankRanges, Duration>> begun;
  RankRanges queueing;
  std::size_t most_queued = 0;

  void Add(const FlightRecord& record) {
    Begun in_lanes(record);
    std::size_t in_lanes_told = 0;
    std::size_t queued = 0;
    for (const FlightRecord::Running& one : record.running) {
      const Event* begin = in_lanes.Take(one);
      // The oldest has begun, though the record may not tell any more.
      if (IsOfALane(one.what) && begin == nullptr && in_lanes_told > 0) {
        ++queued;
        continue;
      }
      if (IsOfALane(one.what)) ++in_lanes_told;
      auto& [ranks, longest] = begun[{one.set, one.what}];
      ranks.Add(record.rank);
      const TimePoint since = begin != nullptr ? begin->begin : one.since;
      longest = std::max(longest, EndOf(record) - since);
    }
    if (queued > 0) queueing.Add(record.rank);
    most_queued = std::max(most_queued, queued);
  }
};

}  // namespace

std::string SetText(std::uint32_t set) {
  return set == core::kWorldSet ? "the world" : "process set " + std::to_string(set);
}

std::string RunningText(const Records& records) {
  Telling telling;
  for (const auto& [rank, record] : records) telling.Add(*record);
  std::vector<std::pair<Duration, std::string>> lines;
  for (const auto& [what, where] : telling.begun) {
    const auto& [ranks, longest] = where;
    std::string line = RanksText(ranks) + (ranks.Count() == 1 ? " is in " : " are in ") +
                       what.second + " of " + SetText(what.first) + " for " +
                       DurationText(longest) + ".\n";
    line[0] = 'R';
    lines.emplace_back(longest, std::move(line));
  }
  std::stable_sort(lines.begin(), lines.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::string text;
  for (std::size_t i = 0; i < std::min(lines.size(), kMostTold); ++i) text += lines[i].second;
  if (lines.size() > kMostTold) {
    text += "And " + std::to_string(lines.size() - kMostTold) + " more operations are under way.\n";
  }
  if (telling.most_queued > 0) {
    const bool one = telling.queueing.Count() == 1;
    std::string line = RanksText(telling.queueing) + (one ? " has " : " have up to ") +
                       std::to_string(telling.most_queued) + " more in the queue behind " +
                       (one ? "it" : "that") + ".\n";
    line[0] = 'R';
    text += line;
  }
  return text;
}

}  // namespace sirtaki::launch
