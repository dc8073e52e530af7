#include "launch/explain.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "core/mismatch.h"
#include "core/text.h"

namespace sirtaki::launch {
namespace {

using core::Duration;
using core::DurationText;
using core::RankRanges;
using core::RanksText;
using core::trace::Event;
using core::trace::EventKind;
using core::trace::FlightRecord;

using Records = std::map<int, const FlightRecord*>;  // by rank

// A call that some ranks have made and others have not.
struct Wait {
  std::uint32_t set = 0;
  std::string key;
  std::string what;
  RankRanges waiting;
  RankRanges missing;  // members that have left a record and have not made the call
  RankRanges unknown;  // members that have left none
  bool members_known = false;
  std::uint64_t number = 0;  // the how-manieth call it was, of the first of `waiting`
  Duration waited{};         // the longest
  std::size_t others = 0;    // more calls between the same ranks

  auto Between() const { return std::make_tuple(set, waiting.ToString(), missing.ToString()); }
};

std::string SetText(std::uint32_t set) {
  return set == core::kWorldSet ? "the world" : "process set " + std::to_string(set);
}

std::string Capital(std::string text) {
  if (!text.empty()) text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text;
}

std::string Verb(const RankRanges& ranks, const std::string& one, const std::string& many) {
  return RanksText(ranks) + " " + (ranks.Count() == 1 ? one : many);
}

const FlightRecord::Set* FindSet(const FlightRecord& record, std::uint32_t number) {
  for (const FlightRecord::Set& set : record.sets) {
    if (set.number == number) return &set;
  }
  return nullptr;
}

std::vector<Wait> FindWaits(const Records& records) {
  std::map<std::pair<std::uint32_t, std::string>, Wait> by_key;
  for (const auto& [rank, record] : records) {
    for (const FlightRecord::Pending& call : record->pending) {
      Wait& wait = by_key[{call.set, call.key}];
      if (wait.waiting.empty()) {
        wait.set = call.set;
        wait.key = call.key;
        wait.what = call.what;
        wait.number = call.number;
      }
      // A rank whose engine is stuck does not tell them.
      if (const FlightRecord::Set* set = FindSet(*record, call.set); set && wait.missing.empty()) {
        wait.missing = set->members;
      }
      wait.waiting.Add(rank);
      wait.waited = std::max(wait.waited, record->now - call.since);
    }
  }
  std::vector<Wait> waits;
  for (auto& [key, wait] : by_key) {
    wait.members_known = !wait.missing.empty();
    wait.missing.Remove(wait.waiting);
    for (const int rank : wait.missing.ToVector()) {
      const auto record = records.find(rank);
      if (record == records.end()) {
        wait.unknown.Add(rank);
      } else if (const auto* set = FindSet(*record->second, wait.set); set && set->joined) {
        wait.missing.Remove(RankRanges::Single(rank));
      }
    }
    wait.missing.Remove(wait.unknown);
    waits.push_back(std::move(wait));
  }
  // Of the calls between the same ranks the one that was made first stands for all.
  std::stable_sort(waits.begin(), waits.end(), [](const Wait& a, const Wait& b) {
    return a.number != b.number ? a.number < b.number : a.waited > b.waited;
  });
  std::vector<Wait> distinct;
  for (Wait& wait : waits) {
    const auto same = std::find_if(distinct.begin(), distinct.end(), [&](const Wait& other) {
      return other.Between() == wait.Between();
    });
    if (same == distinct.end()) {
      distinct.push_back(std::move(wait));
    } else {
      ++same->others;
      same->waited = std::max(same->waited, wait.waited);
    }
  }
  std::stable_sort(distinct.begin(), distinct.end(),
                   [](const Wait& a, const Wait& b) { return a.waited > b.waited; });
  return distinct;
}

std::string CallText(const Wait& wait) {
  std::string text = wait.what.empty() ? wait.key : wait.what + " " + wait.key;
  if (wait.others > 0) {
    text += " and " + std::to_string(wait.others) + (wait.others == 1 ? " other" : " others");
  }
  return text;
}

// The pair in which each side waits for what the other has not called.
std::optional<std::pair<Wait, Wait>> FindCrossing(const std::vector<Wait>& waits) {
  for (const Wait& a : waits) {
    for (const Wait& b : waits) {
      if (a.set == b.set && a.key < b.key && a.missing.Intersects(b.waiting) &&
          b.missing.Intersects(a.waiting)) {
        return std::make_pair(a, b);
      }
    }
  }
  return std::nullopt;
}

std::string CrossingText(const Wait& a, const Wait& b) {
  const auto call = [](const Wait& wait) {
    return RanksText(wait.waiting) + " called " + CallText(wait) + " (call " +
           std::to_string(wait.number) + ")";
  };
  return "The ranks call in a different order in " + SetText(a.set) + ": " + call(a) + " where " +
         call(b) + ", and each side waits for the other's.";
}

const Event* LastCall(const FlightRecord& record, std::uint32_t set) {
  for (auto event = record.events.rbegin(); event != record.events.rend(); ++event) {
    if (event->kind == EventKind::kSubmit && event->set == set) return &*event;
  }
  return nullptr;
}

// What a rank does that others wait for.
std::string DoingText(const FlightRecord& record, std::uint32_t set_number) {
  std::string text = "rank " + std::to_string(record.rank) + " on " + record.host;
  const FlightRecord::Set* set = FindSet(record, set_number);
  const std::uint64_t calls = set != nullptr ? set->submitted : 0;
  if (const Event* last = LastCall(record, set_number)) {
    text += " made its last call there, " + std::string(last->text()) + " (call " +
            std::to_string(last->number) + "), " + DurationText(record.now - last->begin) +
            " before this was written";
  } else {
    text += calls == 0 ? " has made no call there" : " made its last call there long ago";
  }
  if (!record.pending.empty()) {
    const FlightRecord::Pending& call = record.pending.front();
    return text + ", and waits in " + call.what + " " + call.key + " of " + SetText(call.set);
  }
  if (!record.running.empty()) {
    const FlightRecord::Running& running = record.running.front();
    return text + ", and has been in " + running.what + " for " +
           DurationText(record.now - running.since);
  }
  return text + ", and waits for nobody: it is in the program's own code";
}

std::string WaitText(const Wait& wait, const Records& records) {
  std::string text = Capital(Verb(wait.waiting, "waits", "wait")) + " in " + CallText(wait) +
                     " of " + SetText(wait.set) + " for " + DurationText(wait.waited);
  if (!wait.members_known) return text + ".";
  if (wait.missing.empty() && wait.unknown.empty()) {
    return text + ", which every member has called: the agreement was on its way.";
  }
  if (!wait.missing.empty()) {
    text += "; " + Verb(wait.missing, "has", "have") + " not called it";
  }
  if (!wait.unknown.empty()) {
    text += "; of " + RanksText(wait.unknown) + " there is no record";
  }
  text += ".";
  constexpr std::size_t kMostTold = 4;
  std::size_t told = 0;
  for (const int rank : wait.missing.ToVector()) {
    if (told++ == kMostTold) break;
    text += "\n  " + Capital(DoingText(*records.at(rank), wait.set)) + ".";
  }
  return text;
}

// Operations that have begun and not ended, by what they are.
std::string RunningText(const Records& records) {
  std::map<std::pair<std::uint32_t, std::string>, std::pair<RankRanges, Duration>> running;
  for (const auto& [rank, record] : records) {
    for (const FlightRecord::Running& one : record->running) {
      auto& [ranks, longest] = running[{one.set, one.what}];
      ranks.Add(rank);
      longest = std::max(longest, record->now - one.since);
    }
  }
  std::string text;
  for (const auto& [what, where] : running) {
    text += Capital(Verb(where.first, "is", "are")) + " in " + what.second + " of " +
            SetText(what.first) + " for " + DurationText(where.second) + ".\n";
  }
  return text;
}

std::string WhoText(const Records& records, int size) {
  RankRanges there;
  for (const auto& [rank, record] : records) there.Add(rank);
  RankRanges absent = RankRanges::Span(0, size - 1);
  absent.Remove(there);
  if (absent.empty()) {
    return size == 1 ? "The record of the only rank.\n"
                     : "Records of all " + std::to_string(size) + " ranks.\n";
  }
  return "Records of " + RanksText(there) + " of " + std::to_string(size) + "; " +
         Verb(absent, "has", "have") +
         " left none: killed without warning, lost with the host, or not asked to write one.\n";
}

// Of the faults that the ranks know, the one that most of them do; they agree unless some were cut
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
  return "The group failed: " + most->first + "\n";
}

}  // namespace

std::string Explain(const std::vector<FlightRecord>& all) {
  Records records;
  int size = 1;
  for (const FlightRecord& record : all) {
    records[record.rank] = &record;
    size = std::max(size, record.size);
  }
  const std::vector<Wait> waits = FindWaits(records);
  std::string text = WhoText(records, size) + FaultText(records);
  if (const auto crossing = FindCrossing(waits)) {
    text += CrossingText(crossing->first, crossing->second) + "\n";
  }
  for (const Wait& wait : waits) text += WaitText(wait, records) + "\n";
  text += RunningText(records);
  for (const auto& [rank, record] : records) {
    if (record->missing.empty()) continue;
    text += "The record of rank " + std::to_string(rank) + " lacks " + record->missing + ".\n";
  }
  if (waits.empty() && RunningText(records).empty()) {
    text += "No rank waits for another, and nothing is under way.\n";
  }
  return text;
}

}  // namespace sirtaki::launch
