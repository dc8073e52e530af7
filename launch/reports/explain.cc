#include "launch/reports/explain.h"

#include <algorithm>
#include <ctime>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "core/base/text.h"
#include "core/base/words.h"
#include "core/protocol/mismatch.h"
#include "launch/reports/explain_calls.h"
#include "launch/reports/explain_running.h"
#include "launch/reports/explain_waits.h"

namespace sirtaki::launch {
namespace {

using core::DurationText;
using core::RanksText;

// More than a person reads.
constexpr std::size_t kMostWaits = 6;
constexpr std::size_t kMostRanks = 4;
constexpr std::size_t kMostDoing = 16;

std::string Capital(std::string text) {
  if (!text.empty()) text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text;
}

std::string Verb(const RankRanges& ranks, const std::string& one, const std::string& many) {
  return RanksText(ranks) + " " + (ranks.Count() == 1 ? one : many);
}

std::string CallText(const Wait& wait) {
  std::string text = wait.what;
  if (!wait.key.empty()) text += (text.empty() ? "" : " ") + wait.key;
  if (wait.others > 0) text += " and " + core::CountText(wait.others, "other");
  return text;
}

std::string CrossingText(const Wait& a, const Wait& b) {
  const auto call = [](const Wait& wait) {
    return RanksText(wait.waiting) + " called " + CallText(wait) + " (call " +
           std::to_string(wait.number) + ")";
  };
  return "The ranks call in a different order in " + SetText(a.set) + ": " + call(a) + " where " +
         call(b) + ", and each side waits for the other's.";
}

// Says what a rank does, or did when it wrote its record, that others wait for.
std::string DoingText(const FlightRecord& record, const Wait& wait) {
  std::string text = "rank " + std::to_string(record.rank) + " on " + record.host;
  const std::string there = wait.of_shutdown ? "" : " there";
  const FlightRecord::Set* set = FindSet(record, wait.set);
  const auto of = wait.of_shutdown ? std::nullopt : std::optional(wait.set);
  if (const Event* last = LastCall(record, of)) {
    text += " made its last call" + there + ", " + core::Escaped(last->text()) + " (call " +
            std::to_string(last->number) + "), " + DurationText(EndOf(record) - last->begin) +
            (record.fault.ok() ? " before it wrote this" : " before the group failed");
  } else if (set != nullptr && set->submitted > 0) {
    text += " made its last call" + there + " long ago";
  } else {
    text += " has made no call" + there;
  }
  if (!record.pending.empty()) {
    const FlightRecord::Pending& call = record.pending.front();
    return text + ", and waits in " + call.what + (call.what.empty() ? "" : " ") + call.key +
           " of " + SetText(call.set);
  }
  if (record.leaving) {
    return text + ", and waits in shutdown() for " + DurationText(EndOf(record) - *record.leaving);
  }
  if (!record.running.empty()) {
    const FlightRecord::Running& running = record.running.front();
    return text + ", and has been in " + running.what + " for " +
           DurationText(EndOf(record) - running.since);
  }
  if (!record.doing.empty()) return text + ", and is " + record.doing;
  return text + ", and waits for nobody: it is in the program's own code";
}

// `with_ranks`: also what those do that are waited for.
std::string WaitText(const Wait& wait, const Records& records, bool with_ranks) {
  std::string text = Capital(Verb(wait.waiting, "waits", "wait")) + " in " + CallText(wait);
  if (!wait.of_shutdown) text += " of " + SetText(wait.set);
  text += " for " + DurationText(wait.waited);
  if (!wait.members_known) return text + ".";
  if (wait.is_complete()) {
    return text + (wait.of_shutdown
                       ? ", as all do: the end was on its way."
                       : ", which every member has called: the agreement was on its way.");
  }
  if (!wait.missing.empty()) text += "; " + Verb(wait.missing, "has", "have") + " not called it";
  if (!wait.earlier.empty()) {
    Duration before{};
    for (const int rank : wait.earlier.ToVector()) {
      const FlightRecord& record = *records.at(rank);
      before = std::max(before, LastOf(records) - (record.now + record.offset));
    }
    text += "; " + RanksText(wait.earlier) + " had not called it when " +
            (wait.earlier.Count() == 1 ? "its record was" : "their records were") + " written, " +
            (wait.earlier.Count() == 1 ? "" : "up to ") + DurationText(before) +
            " before the last of these";
  }
  if (!wait.untold.empty()) {
    text += "; whether " + Verb(wait.untold, "has", "have") + " called it is no longer in " +
            (wait.untold.Count() == 1 ? "its record" : "their records");
  }
  if (!wait.unknown.empty()) text += "; " + RanksText(wait.unknown) + " left no record";
  text += ".";
  if (!with_ranks) return text;
  RankRanges late = wait.missing;
  late.Add(wait.earlier);
  std::size_t told = 0;
  for (const int rank : late.ToVector()) {
    if (told++ == kMostRanks) break;
    text += "\n  " + Capital(DoingText(*records.at(rank), wait)) + ".";
  }
  return text;
}

// The waits of a crossing do not say what the ranks do, which has been told there.
std::string WaitsText(const std::vector<Wait>& waits, const Records& records,
                      const std::optional<std::pair<Wait, Wait>>& crossing) {
  const auto crosses = [&](const Wait& wait) {
    const auto is = [&](const Wait& side) {
      return side.set == wait.set && side.key == wait.key && side.number == wait.number;
    };
    return crossing && (is(crossing->first) || is(crossing->second));
  };
  std::string text;
  for (std::size_t i = 0; i < std::min(waits.size(), kMostWaits); ++i) {
    text += WaitText(waits[i], records, !crosses(waits[i])) + "\n";
  }
  if (waits.size() > kMostWaits) {
    text += "And " + std::to_string(waits.size() - kMostWaits) + " more waits.\n";
  }
  return text;
}

std::string TimeText(std::int64_t unix_us) {
  const std::time_t seconds = unix_us / 1'000'000;
  std::tm time{};
  gmtime_r(&seconds, &time);
  char text[64];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &time)};
}

// What ranks are in the middle of, as far as they know it themselves and `told_before` does not have it.
std::string DoingsText(const Records& records, const std::string& told_before) {
  std::string text;
  std::size_t told = 0;
  for (const auto& [rank, record] : records) {
    if (record->doing.empty() || told_before.find(record->doing) != std::string::npos) continue;
    if (told++ >= kMostDoing) continue;
    text += "Rank " + std::to_string(rank) + ": " + record->doing + ".\n";
  }
  if (told > kMostDoing) {
    text += "Ranks that are in the middle of something and not listed: " +
            std::to_string(told - kMostDoing) + ".\n";
  }
  return text;
}

// Records that were written for the same reason, and tell of the same.
struct Written {
  RankRanges ranks;
  std::int64_t first = 0;  // by the clocks on the wall
  std::int64_t last = 0;
  Duration before{};  // the last of all records: the most

  std::string Text(const std::string& why) const {
    const std::string begin = TimeText(first);
    const std::string end = TimeText(last);
    return why + ", " + begin + (end == begin ? "" : " to " + end);
  }
};

// Which ranks have left a record, why and when.
std::string WhoText(const Records& records, int size) {
  const TimePoint last = LastOf(records);
  const bool failed = std::any_of(records.begin(), records.end(),
                                  [](const auto& one) { return !one.second->fault.ok(); });
  // Groups are keyed by why, whether it does not know of the failure, and whether it is an earlier
  // one.
  std::map<std::tuple<std::string, bool, bool>, Written> groups;
  RankRanges there;
  for (const auto& [rank, record] : records) {
    there.Add(rank);
    Written& group = groups[{record->why.empty() ? "for no known reason" : record->why,
                             failed && record->fault.ok(), !IsOfTheEnd(*record, last)}];
    if (group.ranks.empty()) group.first = group.last = record->unix_us;
    group.ranks.Add(rank);
    group.first = std::min(group.first, record->unix_us);
    group.last = std::max(group.last, record->unix_us);
    group.before = std::max(group.before, last - (record->now + record->offset));
  }
  RankRanges absent = RankRanges::Span(0, size - 1);
  absent.Remove(there);
  std::string text = !absent.empty()
                         ? "Records of " + RanksText(there) + " of " + std::to_string(size) + "; " +
                               Verb(absent, "has", "have") +
                               " left none: killed without warning, lost with the "
                               "host, or not asked to write one"
                     : size == 1 ? "The record of the only rank"
                                 : "Records of all " + std::to_string(size) + " ranks";
  if (groups.size() == 1) {
    const auto& [why, written] = *groups.begin();
    return text + (absent.empty() ? " (" : ". They were written (") +
           written.Text(std::get<0>(why)) + ").\n";
  }
  text += ":\n";
  for (const auto& [why, written] : groups) {
    const auto& [reason, does_not_know, is_earlier] = why;
    const bool one = written.ranks.Count() == 1;
    text += "  " + RanksText(written.ranks) + ": " + written.Text(reason);
    if (is_earlier) text += ", " + DurationText(written.before) + " before the last of these";
    if (does_not_know) {
      text += std::string("; ") + (one ? "it does" : "they do") + " not know of the failure";
    }
    text += "\n";
  }
  return text;
}

// The fault told is the one that most ranks know; they agree unless some were cut
// off.
std::string FaultText(const Records& records) {
  std::map<std::string, RankRanges> faults;
  for (const auto& [rank, record] : records) {
    if (!record->fault.ok()) faults[record->fault.ToString()].Add(rank);
  }
  if (faults.empty()) return {};
  const auto most = std::max_element(
      faults.begin(), faults.end(),
      [](const auto& a, const auto& b) { return a.second.Count() < b.second.Count(); });
  return "The group failed: " + core::Escaped(most->first) + "\n";
}

// Escapes what texts here have of a record; events and faults are escaped where they are used.
void Escape(FlightRecord* record) {
  const auto escape = [](std::string* text) { *text = core::Escaped(*text); };
  escape(&record->host);
  escape(&record->why);
  escape(&record->missing);
  escape(&record->doing);
  for (FlightRecord::Pending& call : record->pending) {
    escape(&call.key);
    escape(&call.what);
  }
  for (FlightRecord::Running& running : record->running) escape(&running.what);
}

}  // namespace

std::string Explain(std::vector<FlightRecord> all) {
  Records records;
  int size = 1;
  for (FlightRecord& record : all) {
    Escape(&record);
    records[record.rank] = &record;
    size = std::max(size, record.size);
  }
  const std::vector<Wait> waits = FindWaits(records, size);
  std::string text = WhoText(records, size) + FaultText(records);
  const auto crossing = FindCrossing(waits, records);
  if (crossing) {
    text += CrossingText(crossing->first, crossing->second) + "\n";
  }
  const std::string running = RunningText(records);
  text += WaitsText(waits, records, crossing) + running;
  const std::string doings = DoingsText(records, text);
  text += doings;
  for (const auto& [rank, record] : records) {
    if (record->missing.empty()) continue;
    text += "The record of rank " + std::to_string(rank) + " lacks " + record->missing + ".\n";
  }
  if (waits.empty() && running.empty() && doings.empty()) {
    text += "No rank waits for another, and nothing is under way.\n";
  }
  return text;
}

}  // namespace sirtaki::launch
