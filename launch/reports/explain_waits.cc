#include "launch/reports/explain_waits.h"

#include <algorithm>
#include <tuple>

#include "launch/reports/explain_calls.h"

namespace sirtaki::launch {
namespace {

using Answer = Calls::Answer;

// Ranks that have made a call so lately may be on their way to the next.
constexpr Duration kQuiet = std::chrono::seconds(1);

// The calls of one rank, and what it waits in.
struct Waiter {
  int rank = 0;
  const FlightRecord::Pending* call = nullptr;
};

// The rank cannot have made a call afterwards.
bool IsLastWord(const FlightRecord& record) {
  return !record.fault.ok() || record.why == "SIGABRT";
}

class WaitFinder {
 public:
  WaitFinder(const Records& records, int size)
      : records_(records), size_(size), last_(LastOf(records)) {
    for (const auto& [rank, record] : records) calls_.emplace(rank, *record);
  }

  std::vector<Wait> Find() const {
    std::map<std::pair<std::uint32_t, std::string>, std::vector<Waiter>> by_key;
    for (const auto& [rank, record] : records_) {
      for (const FlightRecord::Pending& call : record->pending) {
        by_key[{call.set, call.key}].push_back({rank, &call});
      }
    }
    std::vector<Wait> waits;
    for (const auto& [key, waiters] : by_key) {
      // Calls of one key are not of one use if some ranks are ahead.
      std::vector<std::vector<Waiter>> uses;
      for (const Waiter& waiter : waiters) {
        const auto same = std::find_if(uses.begin(), uses.end(), [&](const auto& use) {
          return Asked(waiter.rank, use.front()) != Answer::kNotMade &&
                 Asked(use.front().rank, waiter) != Answer::kNotMade;
        });
        if (same == uses.end()) {
          uses.push_back({waiter});
        } else {
          same->push_back(waiter);
        }
      }
      for (const auto& use : uses) waits.push_back(OfUse(use));
    }
    if (Wait wait = OfShutdown(); !wait.waiting.empty()) waits.push_back(std::move(wait));
    return waits;
  }

 private:
  Answer Asked(int rank, const Waiter& of) const {
    return calls_.at(rank).HasMade(*of.call, calls_.at(of.rank));
  }

  Wait OfUse(const std::vector<Waiter>& waiters) const {
    const FlightRecord::Pending& first = *waiters.front().call;
    Wait wait;
    wait.set = first.set;
    wait.key = first.key;
    wait.what = first.what;
    wait.number = first.number;
    RankRanges members;
    TimePoint since = TimePoint::max();
    for (const auto& [rank, call] : waiters) {
      const FlightRecord& record = *records_.at(rank);
      wait.waiting.Add(rank);
      wait.waited = std::max(wait.waited, EndOf(record) - call->since);
      since = std::min(since, call->since + record.offset);
      // A rank whose engine is stuck does not tell them.
      if (const auto* set = FindSet(record, wait.set); set != nullptr && members.empty()) {
        members = set->members;
      }
    }
    wait.members_known = !members.empty();
    members.Remove(wait.waiting);
    AddAbsent(&members, &wait);
    for (const int rank : members.ToVector()) {
      const FlightRecord& record = *records_.at(rank);
      const auto* set = FindSet(record, wait.set);
      if (set != nullptr && set->joined) continue;
      switch (Asked(rank, waiters.front())) {
        case Answer::kMade:
          break;
        case Answer::kNotMade:
          AddMissing(record, since, &wait);
          break;
        case Answer::kUnknown:
          wait.untold.Add(rank);
      }
    }
    return wait;
  }

  Wait OfShutdown() const {
    Wait wait;
    wait.what = "shutdown()";
    wait.of_shutdown = true;
    wait.members_known = true;
    RankRanges members = RankRanges::Span(0, size_ - 1);
    TimePoint since = TimePoint::max();
    for (const auto& [rank, record] : records_) {
      if (!record->leaving) continue;
      wait.waiting.Add(rank);
      wait.waited = std::max(wait.waited, EndOf(*record) - *record->leaving);
      since = std::min(since, *record->leaving + record->offset);
    }
    members.Remove(wait.waiting);
    AddAbsent(&members, &wait);
    for (const int rank : members.ToVector()) AddMissing(*records_.at(rank), since, &wait);
    return wait;
  }

  // Those without a record; the rest stays in `members`.
  void AddAbsent(RankRanges* members, Wait* wait) const {
    RankRanges there;
    for (const auto& [rank, record] : records_) there.Add(rank);
    wait->unknown = *members;
    wait->unknown.Remove(there);
    members->Remove(wait->unknown);
  }

  // It has not made the call, as its record has it; the others have since `since`.
  void AddMissing(const FlightRecord& record, TimePoint since, Wait* wait) const {
    const bool after = CommonEndOf(record) >= since || IsLastWord(record);
    (after && IsOfTheEnd(record, last_) ? wait->missing : wait->earlier).Add(record.rank);
  }

  const Records& records_;
  const int size_;
  const TimePoint last_;
  std::map<int, Calls> calls_;
};

auto Between(const Wait& wait) {
  return std::make_tuple(wait.set, wait.of_shutdown, wait.waiting.ToString(),
                         wait.missing.ToString(), wait.earlier.ToString());
}

// Whether the ranks have made no call lately.
bool AreQuiet(const RankRanges& ranks, const Records& records) {
  return std::all_of(records.begin(), records.end(), [&](const auto& one) {
    const auto& [rank, record] = one;
    if (!ranks.Contains(rank)) return true;
    const Event* last = LastCall(*record, std::nullopt);
    return last == nullptr || EndOf(*record) - last->begin >= kQuiet;
  });
}

}  // namespace

TimePoint LastOf(const Records& records) {
  TimePoint last = TimePoint::min();
  for (const auto& [rank, record] : records) last = std::max(last, record->now + record->offset);
  return last;
}

bool IsOfTheEnd(const FlightRecord& record, TimePoint last) {
  return IsLastWord(record) || last - (record.now + record.offset) <= kTogether;
}

std::vector<Wait> FindWaits(const Records& records, int size) {
  std::vector<Wait> waits = WaitFinder(records, size).Find();
  // The call that was made first between the same ranks stands for all.
  std::stable_sort(waits.begin(), waits.end(), [](const Wait& a, const Wait& b) {
    return a.number != b.number ? a.number < b.number : a.waited > b.waited;
  });
  std::vector<Wait> distinct;
  for (Wait& wait : waits) {
    const auto same = std::find_if(distinct.begin(), distinct.end(), [&](const Wait& other) {
      return Between(other) == Between(wait);
    });
    if (same == distinct.end()) {
      distinct.push_back(std::move(wait));
    } else {
      ++same->others;
      same->waited = std::max(same->waited, wait.waited);
    }
  }
  std::stable_sort(distinct.begin(), distinct.end(), [](const Wait& a, const Wait& b) {
    return a.is_complete() != b.is_complete() ? b.is_complete() : a.waited > b.waited;
  });
  return distinct;
}

std::optional<std::pair<Wait, Wait>> FindCrossing(const std::vector<Wait>& waits,
                                                  const Records& records) {
  for (const Wait& a : waits) {
    for (const Wait& b : waits) {
      if (a.set == b.set && a.key < b.key && !a.of_shutdown && !b.of_shutdown &&
          a.missing.Intersects(b.waiting) && b.missing.Intersects(a.waiting) &&
          AreQuiet(a.waiting, records) && AreQuiet(b.waiting, records)) {
        return std::make_pair(a, b);
      }
    }
  }
  return std::nullopt;
}

const FlightRecord::Set* FindSet(const FlightRecord& record, std::uint32_t number) {
  for (const FlightRecord::Set& set : record.sets) {
    if (set.number == number) return &set;
  }
  return nullptr;
}

const Event* LastCall(const FlightRecord& record, std::optional<std::uint32_t> set) {
  for (auto event = record.events.rbegin(); event != record.events.rend(); ++event) {
    if (event->kind == EventKind::kSubmit && (!set || event->set == *set)) return &*event;
  }
  return nullptr;
}

}  // namespace sirtaki::launch
