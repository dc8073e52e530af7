// These functions tell what a job waits for, so that it does not wait in silence.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/base/words.h"
#include "launch/elastic/membership.h"
#include "launch/elastic/membership_texts.h"

namespace sirtaki::launch {

using core::TimePoint;

// "worker 1 on host b and 2 more"
std::string Membership::NamesOf(const std::vector<WorkerId>& workers) const {
  return NameOf(workers.front(), workers_.at(workers.front()).host) +
         (workers.size() > 1 ? " and " + std::to_string(workers.size() - 1) + " more" : "");
}

// The only worker that there may be has the state, and is to go.
std::string Membership::WaitsForRoom() const {
  if (limits_.max_ranks > 1) return "";
  std::vector<WorkerId> waiting;
  for (const auto& [id, worker] : workers_) {
    if (worker.state == State::kReady) waiting.push_back(id);
  }
  const std::vector<WorkerId> members = Members();
  if (waiting.empty() || members.empty() || IsListed(workers_.at(members.front()))) return "";
  return "room for " + NamesOf(waiting) + ": the place of " + NamesOf(members) +
         " is listed no more, but --max-np 1 lets no other worker take the state over from it: "
         "--max-np 2 would";
}

Membership::Wait Membership::WaitsFor() const {
  if (ended_) return {};
  std::vector<WorkerId> starting;
  std::vector<WorkerId> members;
  std::vector<WorkerId> not_joined;
  std::vector<WorkerId> ending;
  TimePoint starts_by = kNever;
  TimePoint leaves_by = TimePoint::min();
  TimePoint ends_by = TimePoint::min();
  bool has_old = false;
  for (const auto& [id, worker] : workers_) {
    has_old = has_old || (worker.state == State::kReady && worker.member_of > 0);
    switch (worker.state) {
      case State::kStarting:
        starting.push_back(id);
        starts_by = std::min(starts_by, worker.since + limits_.timeout);
        break;
      case State::kMember:
        members.push_back(id);
        if (!worker.joined) not_joined.push_back(id);
        leaves_by = std::max(leaves_by, MustAnswerBy(worker));
        break;
      case State::kEnding:
        ending.push_back(id);
        ends_by = std::max(ends_by, std::min(worker.ends_by, worker.since + limits_.timeout));
        break;
      case State::kReady:
        break;
    }
  }
  const std::string generation = "generation " + std::to_string(generation_);
  if (finished_) {
    const std::vector<WorkerId>& left = members.empty() ? ending : members;
    if (left.empty()) return {};
    return {NamesOf(left) + " to end: the program has ended on " + finished_first_, kNever};
  }
  if (!IsOver()) {
    if (not_joined.empty() || begun_at_ == kNever) return {WaitsForRoom(), kNever};
    return {NamesOf(not_joined) + " to join " + generation, begun_at_ + limits_.join_timeout};
  }
  if (!members.empty()) return {NamesOf(members) + " to leave " + generation, leaves_by};
  const auto missing = limits_.min_ranks - static_cast<int>(Candidates().size());
  const TimePoint late = LateAt();
  if (!starting.empty() && (missing > 0 || !has_old)) {
    return {NamesOf(starting) + ", whose program has not called init()", std::min(late, starts_by)};
  }
  if (missing > 0) {
    return {core::CountText(missing, "more worker") + " (--min-np " +
                std::to_string(limits_.min_ranks) + ")",
            late};
  }
  return ending.empty() ? Wait{} : Wait{NamesOf(ending) + " to end", ends_by};
}

std::vector<Membership::LeftOut> Membership::HostsLeftOut(TimePoint now) const {
  std::vector<LeftOut> left_out;
  if (ended_ || finished_ || is_last_hope_) return left_out;
  const bool is_full = Alive() >= limits_.max_ranks;
  for (const std::string& name : host_order_) {
    const Host& host = hosts_.at(name);
    const auto killed = std::ranges::find_if(workers_, [&name = name](const auto& one) {
      return one.second.host == name && IsKilled(one.second);
    });
    if (killed != workers_.end()) {
      left_out.push_back({name, kNever, NameOf(killed->first, name) + std::string(kDoesNotEnd)});
      continue;
    }
    if (is_full) continue;
    TimePoint orphans = TimePoint::min();
    for (const auto& [id, worker] : workers_) {
      const bool is_orphan = worker.state == State::kEnding && worker.ends_by != kNever;
      if (is_orphan && worker.host == name && IsListed(worker))
        orphans = std::max(orphans, worker.ends_by);
    }
    const bool has_room = !FreeSlots(name, host).empty();
    if (orphans > now && (orphans >= host.not_before || !has_room)) {
      left_out.push_back({name, orphans, "workers that were lost there may run until then"});
    } else if (host.not_before > now && has_room) {
      left_out.push_back(
          {name, host.not_before, "workers have failed there (--blacklist-cooldown-range)"});
    }
  }
  return left_out;
}

}  // namespace sirtaki::launch
