// The part of the negotiator that deals with waiting: who is lost (19), and the end (17).
#include <algorithm>

#include "core/base/text.h"
#include "core/protocol/negotiator.h"

namespace sirtaki::core {

void Negotiator::Due(TimePoint at) { next_deadline_ = std::min(next_deadline_, at); }

void Negotiator::Step(const LocalState& local, TimePoint now) {
  if (faulted() || closed()) return;
  CheckBye(local);
  for (const auto& running : local.running) Due(running.since + options_.ping_interval);
  if (now < NextDeadline()) return;
  next_deadline_ = TimePoint::max();
  stalls_.Step(sets_, local.running, now);
  if (faulted()) return;
  if (local.others_pause) return Due(now + options_.ping_interval);  // to look then
  CheckPeers(local, now);
}

Duration Negotiator::TimeOut(const Key& key, Duration limit, TimePoint now) {
  if (faulted()) return {};
  SetState* set = FindSet(key.set);
  PendingKey* pending = set == nullptr ? nullptr : set->keys.Find(key);
  if (pending == nullptr) {
    // It is decided, and is late in its lane.
    RaiseFault(StatusCode::kTimedOut, TimeOutText(key, limit), TensorName(key));
    return {};
  }
  stalls_.NoteTimeOut(*set, *pending, limit, now);
  return options_.peer_timeout;
}

// ---- lost: no sign of life from a neighbour that is waited for (19) ----

void Negotiator::CheckPeers(const LocalState& local, TimePoint now) {
  for (auto& [number, set] : sets_) {
    if (const auto* oldest = set.keys.Oldest()) WaitOn(set, oldest->since, now);
    if (set.joins.self) WaitOn(set, set.joins.self_since, now);
    if (number == kWorldSet && leaving()) WaitOn(set, *left_since_, now);
    for (const auto& running : local.running) {
      // An operation of a set whose removal is decided still runs: its ranks are watched as the world's.
      const SetNumber among = sets_.contains(running.set) ? running.set : kWorldSet;
      if (among == number) WaitOn(set, running.since, now);
    }
    if (faulted()) return;
  }
  std::erase_if(asked_until_, [&](const auto& entry) { return entry.second <= now; });
  for (const auto& [asked, until] : asked_until_) {
    // The wait counts at once: whoever asks has waited the ping time already.
    WaitOn(*FindSet(asked.first), TimePoint{}, now, /*except=*/asked.second);
    if (faulted()) return;
  }
}

void Negotiator::WaitOn(SetState& set, TimePoint since, TimePoint now, int except) {
  const auto wait_on = [&](int neighbour) {
    if (faulted() || neighbour == except) return;
    const Liveness::Verdict verdict = liveness_.Waiting(neighbour, since, now);
    if (verdict.lost) {
      RaiseFault(
          {StatusCode::kPeerLost,
           "rank " + std::to_string(neighbour) + " is lost: rank " + std::to_string(options_.rank) +
               " on host " + options_.host + " has heard nothing from it for " +
               DurationText(liveness_.Silent(neighbour)) + ", no answer to a ping either " +
               "(peer_timeout is " + DurationText(options_.peer_timeout) +
               "): its process was killed or stopped, or its host or a link is down; who stops "
               "ranks, as in a debugger, needs a longer peer_timeout",
           {neighbour, {}, {}}});
      return;
    }
    if (verdict.ping) SendNow(neighbour, PingMessage{set.number()});
    Due(verdict.next);
  };
  for (const int child : set.children()) wait_on(children_[static_cast<std::size_t>(child)].rank);
  if (!set.seat()) wait_on(node_.parent);
}

// ---- the end (17) ----

void Negotiator::CheckBye(const LocalState& local) {
  if (end_ != End::kBye || !local.drained || !batches_.empty()) return;
  for (const Link& link : children_) {
    if (!link.bye_acknowledged) return;
  }
  if (node_.parent >= 0) {
    end_ = End::kAcknowledged;
    SendNow(node_.parent, ByeAckMessage{});
    return;
  }
  for (const Link& link : children_) SendNow(link.rank, ByeConfirmMessage{});
  end_ = End::kClosed;
}

}  // namespace sirtaki::core
