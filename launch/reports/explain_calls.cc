#include "launch/reports/explain_calls.h"

#include <algorithm>

#include "core/protocol/request.h"

namespace sirtaki::launch {
namespace {

// The key of a pending call as events have it: without what a bucket holds, and cut.
std::string AsInEvents(std::string_view key) {
  if (key.starts_with("bucket ")) key = key.substr(0, key.find(" ("));
  Event event;
  event.SetText(key);
  return std::string(event.text());
}

std::string KeyOf(const Event& event) {
  return event.kind == EventKind::kJoin ? core::Key::Join(event.set).ToString()
                                        : std::string(event.text());
}

}  // namespace

core::TimePoint EndOf(const FlightRecord& record) {
  if (record.fault.ok()) return record.now;
  const auto fault = std::find_if(record.events.begin(), record.events.end(),
                                  [](const Event& e) { return e.kind == EventKind::kFault; });
  return fault == record.events.end() ? record.now : fault->begin;
}

core::TimePoint CommonEndOf(const FlightRecord& record) { return EndOf(record) + record.offset; }

Calls::Calls(const FlightRecord& record) : record_(record) {
  for (const Event& event : record.events) {
    if (event.kind == EventKind::kSubmit || event.kind == EventKind::kJoin) {
      sets_[event.set].uses[KeyOf(event)].push_back({event.begin, event.number, {}});
    } else if (event.kind == EventKind::kNegotiate) {
      Set& set = sets_[event.set];
      if (!set.first_batch) set.first_batch = event.number;
      set.last_batch = event.number;
      std::vector<Use>& uses = set.uses[KeyOf(event)];
      const auto agreed = std::find_if(uses.rbegin(), uses.rend(),
                                       [&](const Use& use) { return use.since == event.begin; });
      if (agreed != uses.rend()) {
        agreed->batch = event.number;
      } else {  // its call was overwritten
        uses.push_back({event.begin, 0, event.number});
      }
    }
  }
  for (const FlightRecord::Pending& call : record.pending) {
    std::vector<Use>& uses = sets_[call.set].uses[AsInEvents(call.key)];
    const auto same = [&](const Use& use) { return use.number == call.number && !use.batch; };
    if (std::none_of(uses.begin(), uses.end(), same)) {  // not taken yet, or overwritten
      uses.push_back({call.since, call.number, {}});
    }
  }
}

const Calls::Set& Calls::Find(std::uint32_t set) const {
  static const Set kNone;
  const auto found = sets_.find(set);
  return found == sets_.end() ? kNone : found->second;
}

// Uses of a key after the last one that was agreed on in that batch, or earlier.
std::uint64_t Calls::CountAfter(const Set& set, std::string_view key,
                                std::optional<std::uint64_t> batch) {
  const auto found = set.uses.find(key);
  if (found == set.uses.end()) return 0;
  std::uint64_t count = 0;
  for (auto use = found->second.rbegin(); use != found->second.rend(); ++use, ++count) {
    if (batch && use->batch && *use->batch <= *batch) break;
  }
  return count;
}

Calls::Answer Calls::HasMade(const FlightRecord::Pending& call, const Calls& other) const {
  const Set& ours = Find(call.set);
  const Set& theirs = other.Find(call.set);
  const auto untold = [](const Set& set, const FlightRecord& record) {
    return record.lost > 0 && !set.last_batch;
  };
  if (untold(ours, record_) || untold(theirs, other.record_)) return ByNumber(call);
  // One less than the last one, which may be only half in the record.
  std::optional<std::uint64_t> seen;
  if (ours.last_batch && theirs.last_batch) seen = std::min(*ours.last_batch, *theirs.last_batch);
  if (seen) seen = *seen > 0 ? std::optional(*seen - 1) : std::nullopt;
  const std::string key = AsInEvents(call.key);
  if (CountAfter(ours, key, seen) < CountAfter(theirs, key, seen)) {
    const bool all_there = record_.lost == 0 || (seen && *ours.first_batch <= *seen);
    return all_there ? Answer::kNotMade : ByNumber(call);
  }
  const bool all_there = other.record_.lost == 0 || (seen && *theirs.first_batch <= *seen);
  return all_there ? Answer::kMade : ByNumber(call);
}

// Answers by what is known without the batches: ranks mostly make their calls in the same order.
Calls::Answer Calls::ByNumber(const FlightRecord::Pending& call) const {
  const Set& set = Find(call.set);
  if (const auto uses = set.uses.find(AsInEvents(call.key)); uses != set.uses.end()) {
    const auto same = [&](const Use& use) { return use.number == call.number; };
    if (std::any_of(uses->second.begin(), uses->second.end(), same)) return Answer::kMade;
  }
  for (const FlightRecord::Set& known : record_.sets) {
    if (known.number == call.set && known.submitted < call.number) return Answer::kNotMade;
  }
  return Answer::kUnknown;
}

}  // namespace sirtaki::launch
