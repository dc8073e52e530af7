// The part of the negotiator that deals with waiting: who is late (18), who is lost (19), and the
// end (17).
#include <algorithm>
#include <utility>

#include "core/base/text.h"
#include "core/protocol/mismatch.h"
#include "core/protocol/negotiator.h"

namespace sirtaki::core {
namespace {

void AddActivities(std::vector<RankActivity>& into, std::vector<RankActivity> more) {
  for (RankActivity& activity : more) {
    if (into.size() < kMaxActivities) {
      into.push_back(std::move(activity));
    } else if (activity.waits_for) {  // a circle may be closed by this one
      const auto other = std::find_if(into.begin(), into.end(),
                                      [](const RankActivity& a) { return !a.waits_for; });
      if (other != into.end()) *other = std::move(activity);
    }
  }
}

std::string ActivitiesText(const std::vector<RankActivity>& activities) {
  std::string text;
  for (const RankActivity& activity : activities) {
    text += "; rank " + std::to_string(activity.rank) + ": " + activity.text;
  }
  return text;
}

// `"w"`, `barrier: unnamed call #3`
std::string KeyText(const StallWarning& warning) {
  return (warning.kind.empty() ? "" : warning.kind + ": ") + warning.key.ToString();
}

// `"w" and 8 others have waited 60 s`
std::string WaitedText(const StallWarning& warning) {
  std::string text = KeyText(warning);
  if (warning.others > 0) {
    text += " and " + std::to_string(warning.others) + (warning.others == 1 ? " other" : " others");
  }
  return text + (warning.others > 0 ? " have waited " : " has waited ") +
         DurationText(warning.waited);
}

// `"w" is agreed on and has not ended for 60 s; no answer from rank 1`
std::string RunningText(const StallWarning& warning) {
  std::string text = warning.key.ToString() + " is agreed on and has not ended for " +
                     DurationText(warning.waited);
  if (!warning.silent.empty()) text += "; no answer from " + RanksText(warning.silent);
  return text;
}

// `ranks 0-1 have waited 60 s in shutdown for rank 2`
std::string LeavingText(const StallWarning& warning) {
  return RanksText(warning.leaving) + (warning.leaving.Count() == 1 ? " has" : " have") +
         " waited " + DurationText(warning.waited) + " in shutdown for " +
         RanksText(warning.missing);
}

bool HaveCommon(const std::vector<int>& a, const std::vector<int>& b) {
  return std::find_first_of(a.begin(), a.end(), b.begin(), b.end()) != a.end();
}

}  // namespace

std::string TimeOutText(const Key& key, Duration limit) {
  // Measured from the submission, a little after the caller has counted its whole milliseconds.
  const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(limit);
  return key.ToString() + " did not finish within its time-out of " + DurationText(milliseconds);
}

std::string StallText(const StallWarning& warning) {
  if (!warning.leaving.empty()) return LeavingText(warning);
  if (warning.agreed) return RunningText(warning) + ActivitiesText(warning.activities);
  std::string text = WaitedText(warning);
  if (!warning.missing.empty()) text += "; not submitted by " + RanksText(warning.missing);
  if (!warning.silent.empty()) text += "; no answer from " + RanksText(warning.silent);
  return text + ActivitiesText(warning.activities);
}

std::string StallBrief(const StallWarning& warning) {
  if (!warning.leaving.empty()) return LeavingText(warning);
  if (warning.agreed) return "does not end: " + warning.key.ToString();
  RankRanges ranks = warning.missing;
  ranks.Add(warning.silent);
  return "waits for " + RanksText(ranks) + ": " + KeyText(warning);
}

void Negotiator::Due(TimePoint at) { next_deadline_ = std::min(next_deadline_, at); }

void Negotiator::Step(const LocalState& local, TimePoint now) {
  if (faulted() || closed_) return;
  CheckBye(local);
  for (const auto& running : local.running) Due(running.since + options_.ping_interval);
  if (now < next_deadline_) return;
  next_deadline_ = TimePoint::max();
  for (auto& [number, set] : sets_) {
    if (set.OldestPending()) CheckStalls(set, now);
    if (faulted()) return;
  }
  CheckLeaving(now);
  if (faulted()) return;
  FinishQueries(now);
  CheckRunning(local, now);
  if (faulted()) return;
  if (local.others_pause) return Due(now + options_.ping_interval);  // to look then
  CheckPeers(local, now);
}

// ---- late: the engine answers, the program has not submitted (18) ----

void Negotiator::CheckStalls(SetState& set, TimePoint now) {
  const Duration warning = options_.stall_warning;
  const Duration limit = options_.stall_limit;
  const Duration first = warning > Duration::zero() ? warning : limit;
  if (now < set.next_stall_check) return Due(set.next_stall_check);

  // A key that comes later cannot be due before this.
  set.next_stall_check = first > Duration::zero() ? now + first : TimePoint::max();
  if (set.seat()) {
    std::vector<SetState::Undecided> waiting = set.UndecidedKeys();
    // A key that a child told of came later than it has waited.
    std::stable_sort(waiting.begin(), waiting.end(), [](const auto& a, const auto& b) {
      return a.pending->since < b.pending->since;
    });
    Inquire(set, waiting, now);
    if (faulted()) return;
  } else {
    ReportStalls(set, now);
  }
  Due(set.next_stall_check);
}

// All that wait as soon as one has waited for long: the seat makes one warning of them.
void Negotiator::ReportStalls(SetState& set, TimePoint now) {
  const Duration first =
      options_.stall_warning > Duration::zero() ? options_.stall_warning : options_.stall_limit;
  if (first <= Duration::zero()) return;
  std::vector<SetState::Undecided> waiting = set.UndecidedKeys();
  std::erase_if(waiting, [](const auto& key) { return key.pending->stall_reported; });
  bool overdue = false;
  for (const auto& [key, pending] : waiting) {
    overdue |= now - pending->since >= first;
    set.next_stall_check = std::min(set.next_stall_check, pending->since + first);
  }
  if (!overdue) return;
  for (const auto& [key, pending] : waiting) {
    pending->stall_reported = true;
    const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(now - pending->since);
    up_.push_back(StalledItem{*key, waited.count()});
  }
  set.next_stall_check = now + first;
}

Duration Negotiator::TimeOut(const Key& key, Duration limit, TimePoint now) {
  if (faulted()) return {};
  SetState* set = FindSet(key.set);
  PendingKey* pending = set == nullptr ? nullptr : set->Find(key);
  if (pending == nullptr) {
    // It is decided, and is late in its lane.
    RaiseFault(StatusCode::kTimedOut, TimeOutText(key, limit), TensorName(key));
    return {};
  }
  NoteTimeOut(*set, key, *pending, limit, now);
  return options_.peer_timeout;
}

void Negotiator::NoteTimeOut(SetState& set, const Key& key, PendingKey& pending, Duration limit,
                             TimePoint now) {
  if (set.seat()) {
    // Of a call that was late already when it was submitted, too: zero would be none.
    pending.call_limit = std::max<Duration>(limit, std::chrono::microseconds(1));
    set.next_stall_check = now;
    Due(now);
    return;
  }
  const auto us = [](Duration d) {
    return std::chrono::duration_cast<std::chrono::microseconds>(d).count();
  };
  up_.push_back(StalledItem{key, us(now - pending.since), std::max<std::int64_t>(us(limit), 1)});
}

// At the seat: one question at a time, about the key that has waited longest. `waiting`: the oldest
// first.
void Negotiator::Inquire(SetState& set, const std::vector<SetState::Undecided>& waiting,
                         TimePoint now) {
  const Duration warning = options_.stall_warning;
  const Duration limit = options_.stall_limit;
  TimePoint& next = set.next_stall_check;
  for (const auto& [key, pending] : waiting) {
    if (!pending->inquiry) continue;
    if (!pending->inquiry->awaited.empty() && now < pending->inquiry->deadline) {
      next = std::min(next, pending->inquiry->deadline);
      return;
    }
    if (!FinishInquiry(set, *key, *pending, waiting, now)) {
      next = now;  // `waiting` holds what is gone
      return;
    }
    if (faulted()) return;
  }
  std::erase_if(set.next_warning, [&](const auto& late) {
    return std::none_of(waiting.begin(), waiting.end(), [&](const auto& key) {
      return key.pending->warned && HaveCommon(set.Missing(*key.pending), {late.first});
    });
  });
  const auto start = [&](const SetState::Undecided& key, bool fault_after) {
    StartInquiry(set, *key.key, *key.pending, fault_after, now);
    next = key.pending->inquiry->awaited.empty() ? now : key.pending->inquiry->deadline;
  };
  const auto ask = [&](const auto& which) {
    const auto found = std::find_if(waiting.begin(), waiting.end(),
                                    [&](const auto& key) { return which(*key.pending); });
    return found == waiting.end() ? nullptr : &*found;
  };
  if (const auto* const late =
          ask([](const PendingKey& key) { return key.call_limit > Duration::zero(); })) {
    return start(*late, /*fault_after=*/true);
  }
  if (limit > Duration::zero() && !waiting.empty() &&
      now >= waiting.front().pending->since + limit) {
    return start(waiting.front(), /*fault_after=*/true);
  }
  if (const auto* const due = ask([](const PendingKey& key) { return key.to_be_asked; })) {
    start(*due, /*fault_after=*/false);
    due->pending->inquiry->for_circle = true;
    return;
  }
  for (const SetState::Undecided& key : waiting) {
    const TimePoint since = key.pending->since;
    if (limit > Duration::zero()) next = std::min(next, since + limit);
    if (warning <= Duration::zero()) continue;
    TimePoint due = since + warning;
    if (now >= due) {
      bool all_known = true;
      for (const int late : set.Missing(*key.pending)) {
        const auto known = set.next_warning.find(late);
        all_known &= known != set.next_warning.end();
        if (known != set.next_warning.end()) due = std::max(due, known->second);
      }
      if (!all_known || now >= due) return start(key, /*fault_after=*/false);
    }
    next = std::min(next, due);
  }
}

void Negotiator::StartInquiry(SetState& set, const Key& key, PendingKey& pending, bool fault_after,
                              TimePoint now) {
  PendingKey::Inquiry inquiry;
  inquiry.deadline = now + options_.ping_interval;
  inquiry.fault_after = fault_after;
  inquiry.call_limit = pending.call_limit;
  inquiry.number = ++questions_;
  inquiry.asked = set.next_order();
  pending.to_be_asked = false;
  for (const int source : set.Missing(pending)) {
    if (source == kSelf) {
      inquiry.missing.Add(options_.rank);
      inquiry.activities.push_back(Activity());
    } else {
      inquiry.awaited.push_back(source);
      SendNow(children_[static_cast<std::size_t>(source)].rank, QueryMessage{key, inquiry.number});
    }
  }
  pending.inquiry = std::move(inquiry);
}

// False: nobody knows of the key. Who told of it has seen its decision meanwhile, and it is
// forgotten here.
bool Negotiator::FinishInquiry(SetState& set, const Key& key, PendingKey& pending,
                               const std::vector<SetState::Undecided>& waiting, TimePoint now) {
  PendingKey::Inquiry inquiry = std::move(*pending.inquiry);
  pending.inquiry.reset();
  StallWarning warning;
  warning.key = key;
  warning.waited = now - pending.since;
  if (key.form == Key::Form::kUnnamed && !pending.variants.empty()) {
    const SignaturePtr& signature = CollectiveOf(pending.variants.front().asked);
    if (signature != nullptr) warning.kind = OpKindName(signature->kind);
  }
  warning.missing = inquiry.missing;
  warning.activities = std::move(inquiry.activities);
  for (const int child : inquiry.awaited) warning.silent.Add(set.child_members(child));
  RankRanges able = set.members();
  able.Remove(left_);
  if (pending.reports == 0 && warning.silent.empty() && warning.missing.ContainsAll(able)) {
    set.Erase(warning.key);
    return false;
  }
  inquiry.activities = warning.activities;
  NoteHeldUp(set, key, pending, inquiry);
  if (faulted() || inquiry.for_circle) return true;
  // The next warning of this stall comes after as long again, and not one for each of its keys.
  const std::vector<int> missing = set.Missing(pending);
  for (const int late : missing) set.next_warning[late] = now + warning.waited;
  for (const auto& [other, state] : waiting) {
    if (!HaveCommon(missing, set.Missing(*state))) continue;
    state->warned = true;
    if (state != &pending) ++warning.others;
  }
  // Everyone may have submitted while the question was under way.
  if (inquiry.call_limit > Duration::zero()) pending.call_limit = {};
  if (warning.missing.empty() && warning.silent.empty()) return true;
  if (!inquiry.fault_after) {
    warnings_.push_back(std::move(warning));
    return true;
  }
  RankRanges late = warning.missing;
  late.Add(warning.silent);
  if (inquiry.call_limit > Duration::zero()) {
    RaiseFault(StatusCode::kTimedOut,
               TimeOutText(key, inquiry.call_limit) + "; not submitted by " + RanksText(late) +
                   ActivitiesText(warning.activities),
               TensorName(key));
    return true;
  }
  RaiseFault(StatusCode::kTimedOut,
             WaitedText(warning) + " for " + RanksText(late) + ", longer than stall_limit (" +
                 DurationText(options_.stall_limit) + ")" + ActivitiesText(warning.activities),
             TensorName(key));
  return true;
}

void Negotiator::ReceiveQuery(const QueryMessage& asked, TimePoint now) {
  const Key& key = asked.key;
  SetState* set = FindSet(key.set);
  if (IsGone(key.set)) return;
  if (set == nullptr) return Protocol(node_.parent, "a query for a set without members here");
  PassedQuery query;
  query.key = key;
  query.answer.key = key;
  query.answer.number = asked.number;
  // Half of what the asker waits, so that an answer that is not complete still comes in time.
  query.deadline = now + options_.ping_interval / 2;
  static const PendingKey kNothingReported;
  const PendingKey* pending = set->Find(key);
  if (pending == nullptr || !pending->forwarded) {
    for (const int source : set->Missing(pending ? *pending : kNothingReported)) {
      if (source == kSelf) {
        query.answer.missing.Add(options_.rank);
        query.answer.activities.push_back(Activity());
      } else {
        query.awaited.push_back(source);
        SendNow(children_[static_cast<std::size_t>(source)].rank, QueryMessage{key, asked.number});
      }
    }
  }
  // A later question about a stall replaces the earlier one; one about what runs is apart.
  std::erase_if(queries_, [&](const PassedQuery& known) {
    return known.key == key && (known.answer.number == 0) == (asked.number == 0);
  });
  queries_.push_back(std::move(query));
  Due(queries_.back().awaited.empty() ? now : queries_.back().deadline);
}

void Negotiator::ReceiveAnswer(int child, AnswerMessage answer, TimePoint now) {
  SetState* set = FindSet(answer.key.set);
  if (IsGone(answer.key.set)) return;
  if (set == nullptr) {
    return Protocol(children_[static_cast<std::size_t>(child)].rank,
                    "an answer for an unknown set");
  }
  PendingKey* pending = set->Find(answer.key);
  if (pending != nullptr && pending->inquiry && pending->inquiry->number == answer.number) {
    std::erase(pending->inquiry->awaited, child);
    pending->inquiry->missing.Add(answer.missing);
    AddActivities(pending->inquiry->activities, std::move(answer.activities));
    if (pending->inquiry->awaited.empty()) {
      set->next_stall_check = now;
      Due(now);
    }
    return;
  }
  if (running_inquiry_ && oldest_running_->key == answer.key && answer.number == 0) {
    std::erase(running_inquiry_->awaited, child);
    AddActivities(running_inquiry_->activities, std::move(answer.activities));
    return Due(running_inquiry_->awaited.empty() ? now : running_inquiry_->deadline);
  }
  for (PassedQuery& query : queries_) {
    if (query.key != answer.key || query.answer.number != answer.number) continue;
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
                    {{children_[static_cast<std::size_t>(child)].rank, "does not answer", {}}});
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
    for (const auto& running : local.running) {
      if (running.set == number) WaitOn(set, running.since, now);
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
                     DurationText(liveness_.Unanswered(neighbour)) + " (peer_timeout is " +
                     DurationText(options_.peer_timeout) + ")",
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
  StallWarning warning;
  warning.waited = now - *first_left_;
  warning.leaving = left_;
  warning.missing = RankRanges::Span(0, world_size_ - 1);
  warning.missing.Remove(left_);
  if (options_.stall_limit > Duration::zero()) {
    if (warning.waited >= options_.stall_limit) {
      RaiseFault(StatusCode::kTimedOut,
                 LeavingText(warning) + ", longer than stall_limit (" +
                     DurationText(options_.stall_limit) + ")",
                 "");
      return;
    }
    Due(*first_left_ + options_.stall_limit);
  }
  if (options_.stall_warning <= Duration::zero()) return;
  if (!next_leaving_warning_) next_leaving_warning_ = *first_left_ + options_.stall_warning;
  if (now >= *next_leaving_warning_) {
    next_leaving_warning_ = now + warning.waited;
    warnings_.push_back(std::move(warning));
  }
  Due(*next_leaving_warning_);
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
