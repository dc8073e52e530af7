// The part of the negotiator that deals with waiting: who is late (18), who is lost (19), and the
// end (17).
#include <algorithm>
#include <cstdio>
#include <utility>

#include "core/mismatch.h"
#include "core/negotiator.h"

namespace sirtaki::core {
namespace {

std::string Seconds(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

void AddActivities(std::vector<RankActivity>& into, std::vector<RankActivity> more) {
  for (RankActivity& activity : more) {
    if (into.size() < kMaxActivities) into.push_back(std::move(activity));
  }
}

std::string ActivitiesText(const std::vector<RankActivity>& activities) {
  std::string text;
  for (const RankActivity& activity : activities) {
    text += "; rank " + std::to_string(activity.rank) + ": " + activity.text;
  }
  return text;
}

}  // namespace

void Negotiator::Due(TimePoint at) { next_deadline_ = std::min(next_deadline_, at); }

void Negotiator::Step(const LocalState& local, TimePoint now) {
  if (faulted() || closed_) return;
  CheckBye(local);
  for (const auto& [set, since] : local.running) Due(since + options_.ping_interval);
  if (now < next_deadline_) return;
  next_deadline_ = TimePoint::max();
  for (auto& [number, set] : sets_) {
    if (set.OldestPending()) CheckStalls(set, now);
    if (faulted()) return;
  }
  CheckLeaving(now);
  if (faulted()) return;
  FinishQueries(now);
  CheckPeers(local, now);
}

// ---- late: the engine answers, the program has not submitted (18) ----

void Negotiator::CheckStalls(SetState& set, TimePoint now) {
  const Duration warning = options_.stall_warning;
  const Duration limit = options_.stall_limit;
  const Duration first = warning > Duration::zero() ? warning : limit;
  if (first <= Duration::zero()) return;
  if (now < set.next_stall_check) return Due(set.next_stall_check);

  // A key that comes later cannot be due before this.
  TimePoint next = now + first;
  for (auto& [key, pending] : set.pending()) {
    if (pending.forwarded) continue;
    const Duration age = now - pending.since;
    if (!set.seat()) {
      if (pending.stall_reported) continue;
      if (age < first) {
        next = std::min(next, pending.since + first);
        continue;
      }
      pending.stall_reported = true;
      const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(age);
      up_.push_back(StalledItem{key, waited.count()});
      continue;
    }
    if (pending.inquiry && (pending.inquiry->awaited.empty() || now >= pending.inquiry->deadline)) {
      FinishInquiry(set, key, pending, now);
      if (faulted()) return;
    }
    if (pending.inquiry) {
      next = std::min(next, pending.inquiry->deadline);
    } else if (limit > Duration::zero() && age >= limit) {
      StartInquiry(set, key, pending, /*fault_after=*/true, now);
      next = std::min(next, pending.inquiry->awaited.empty() ? now : pending.inquiry->deadline);
    } else if (warning > Duration::zero() && age >= warning && !pending.warned) {
      StartInquiry(set, key, pending, /*fault_after=*/false, now);
      next = std::min(next, pending.inquiry->awaited.empty() ? now : pending.inquiry->deadline);
    } else {
      if (limit > Duration::zero()) next = std::min(next, pending.since + limit);
      if (warning > Duration::zero() && !pending.warned)
        next = std::min(next, pending.since + warning);
    }
  }
  set.next_stall_check = next;
  Due(next);
}

void Negotiator::StartInquiry(SetState& set, const Key& key, PendingKey& pending, bool fault_after,
                              TimePoint now) {
  PendingKey::Inquiry inquiry;
  inquiry.deadline = now + options_.ping_interval;
  inquiry.fault_after = fault_after;
  for (const int source : set.Missing(pending)) {
    if (source == kSelf) {
      inquiry.missing.Add(options_.rank);
      inquiry.activities.push_back({options_.rank, options_.activity()});
    } else {
      inquiry.awaited.push_back(source);
      SendNow(children_[static_cast<std::size_t>(source)].rank, QueryMessage{key});
    }
  }
  pending.inquiry = std::move(inquiry);
}

void Negotiator::FinishInquiry(SetState& set, const Key& key, PendingKey& pending, TimePoint now) {
  PendingKey::Inquiry inquiry = std::move(*pending.inquiry);
  pending.inquiry.reset();
  pending.warned = true;
  StallWarning warning{
      key, now - pending.since, inquiry.missing, std::move(inquiry.activities), {}};
  for (const int child : inquiry.awaited) warning.silent.Add(set.child_members(child));
  // Everyone may have submitted while the question was under way.
  if (warning.missing.empty() && warning.silent.empty()) return;
  if (inquiry.fault_after) {
    RankRanges late = warning.missing;
    late.Add(warning.silent);
    RaiseFault(StatusCode::kTimedOut,
               key.ToString() + " has waited " + Seconds(warning.waited) + " for " +
                   RanksText(late) + ", longer than stall_limit (" + Seconds(options_.stall_limit) +
                   ")" + ActivitiesText(warning.activities),
               key.ToString());
    return;
  }
  warnings_.push_back(std::move(warning));
}

void Negotiator::ReceiveQuery(const Key& key, TimePoint now) {
  SetState* set = FindSet(key.set);
  if (set == nullptr) return Protocol(node_.parent, "a query for a set without members here");
  PassedQuery query;
  query.key = key;
  query.answer.key = key;
  // Half of what the asker waits, so that an answer that is not complete still comes in time.
  query.deadline = now + options_.ping_interval / 2;
  static const PendingKey kNothingReported;
  const PendingKey* pending = set->Find(key);
  if (pending == nullptr || !pending->forwarded) {
    for (const int source : set->Missing(pending ? *pending : kNothingReported)) {
      if (source == kSelf) {
        query.answer.missing.Add(options_.rank);
        query.answer.activities.push_back({options_.rank, options_.activity()});
      } else {
        query.awaited.push_back(source);
        SendNow(children_[static_cast<std::size_t>(source)].rank, QueryMessage{key});
      }
    }
  }
  // A repeated question replaces the earlier one: answers to either are about the same key.
  std::erase_if(queries_, [&](const PassedQuery& known) { return known.key == key; });
  queries_.push_back(std::move(query));
  Due(queries_.back().awaited.empty() ? now : queries_.back().deadline);
}

void Negotiator::ReceiveAnswer(int child, AnswerMessage answer, TimePoint now) {
  SetState* set = FindSet(answer.key.set);
  if (set == nullptr) {
    return Protocol(children_[static_cast<std::size_t>(child)].rank,
                    "an answer for an unknown set");
  }
  PendingKey* pending = set->Find(answer.key);
  if (pending != nullptr && pending->inquiry) {
    std::erase(pending->inquiry->awaited, child);
    pending->inquiry->missing.Add(answer.missing);
    AddActivities(pending->inquiry->activities, std::move(answer.activities));
    if (pending->inquiry->awaited.empty()) {
      set->next_stall_check = now;
      Due(now);
    }
    return;
  }
  for (PassedQuery& query : queries_) {
    if (query.key != answer.key) continue;
    std::erase(query.awaited, child);
    query.answer.missing.Add(answer.missing);
    AddActivities(query.answer.activities, std::move(answer.activities));
    if (query.awaited.empty()) Due(now);
    return;
  }
}

void Negotiator::FinishQueries(TimePoint now) {
  std::erase_if(queries_, [&](PassedQuery& query) {
    if (!query.awaited.empty() && now < query.deadline) {
      Due(query.deadline);
      return false;
    }
    SetState& set = *FindSet(query.key.set);
    for (const int child : query.awaited) {
      query.answer.missing.Add(set.child_members(child));
      AddActivities(query.answer.activities,
                    {{children_[static_cast<std::size_t>(child)].rank, "does not answer"}});
    }
    SendNow(node_.parent, std::move(query.answer));
    return true;
  });
}

// ---- lost: no sign of life from a neighbour that is waited for (19) ----

void Negotiator::CheckPeers(const LocalState& local, TimePoint now) {
  for (auto& [number, set] : sets_) {
    if (const auto oldest = set.OldestPending()) WaitOn(set, *oldest, now);
    if (set.self_joined()) WaitOn(set, set.joined_since, now);
    if (number == kWorldSet && self_left_) WaitOn(set, left_since_, now);
    for (const auto& [running_set, since] : local.running) {
      if (running_set == number) WaitOn(set, since, now);
    }
    if (faulted()) return;
  }
  std::erase_if(asked_until_, [&](const auto& entry) { return entry.second <= now; });
  for (const auto& [asked, until] : asked_until_) {
    // At once: whoever asks has waited the ping time already.
    WaitOn(*FindSet(asked.first), TimePoint{}, now, /*except=*/asked.second);
    if (faulted()) return;
  }
}

void Negotiator::WaitOn(SetState& set, TimePoint since, TimePoint now, int except) {
  const auto wait_on = [&](int neighbour) {
    if (faulted() || neighbour == except) return;
    const Liveness::Verdict verdict = liveness_.Waiting(neighbour, since, now);
    if (verdict.lost) {
      RaiseFault(StatusCode::kPeerLost,
                 "rank " + std::to_string(neighbour) + " is lost: it has not answered a ping for " +
                     Seconds(liveness_.Unanswered(neighbour, now)) + " (peer_timeout is " +
                     Seconds(options_.peer_timeout) + ")",
                 "");
      return;
    }
    if (verdict.ping) SendNow(neighbour, PingMessage{set.number()});
    Due(verdict.next);
  };
  for (const int child : set.children()) wait_on(children_[static_cast<std::size_t>(child)].rank);
  if (!set.seat()) wait_on(node_.parent);
}

// ---- the end (17) ----

// Waiting in shutdown is a key like any other (18): the root, which everybody's leaving reaches,
// watches.
void Negotiator::CheckLeaving(TimePoint now) {
  if (node_.parent >= 0 || left_.empty() || left_.Count() == world_size_) return;
  if (!first_left_) first_left_ = now;
  const Duration waited = now - *first_left_;
  RankRanges missing = RankRanges::Span(0, world_size_ - 1);
  missing.Remove(left_);
  if (options_.stall_limit > Duration::zero()) {
    if (waited >= options_.stall_limit) {
      RaiseFault(StatusCode::kTimedOut,
                 RanksText(left_) + " has waited " + Seconds(waited) + " in shutdown for " +
                     RanksText(missing) + ", longer than stall_limit (" +
                     Seconds(options_.stall_limit) + ")",
                 "shutdown");
      return;
    }
    Due(*first_left_ + options_.stall_limit);
  }
  if (options_.stall_warning <= Duration::zero() || leaving_warned_) return;
  if (waited < options_.stall_warning) return Due(*first_left_ + options_.stall_warning);
  leaving_warned_ = true;
  warnings_.push_back({Key::Named(kWorldSet, "shutdown"), waited, std::move(missing), {}, {}});
}

void Negotiator::CheckBye(const LocalState& local) {
  if (!bye_ || bye_acknowledged_ || !local.drained || !batches_.empty()) return;
  for (const Link& link : children_) {
    if (!link.bye_acknowledged) return;
  }
  if (node_.parent >= 0) {
    bye_acknowledged_ = true;
    SendNow(node_.parent, ByeAckMessage{});
    return;
  }
  for (const Link& link : children_) SendNow(link.rank, ByeConfirmMessage{});
  bye_acknowledged_ = true;
  closed_ = true;
}

}  // namespace sirtaki::core
