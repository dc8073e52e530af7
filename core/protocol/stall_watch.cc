// The stall watch tells who is late (18): questions to those who miss a key, the answers, and what
// is said.
#include "core/protocol/stall_watch.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/base/text.h"
#include "core/base/words.h"
#include "core/protocol/mismatch.h"

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
    text += " and " + CountText(warning.others, "other");
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

StallWatch::StallWatch(StallOptions options, const Tree::Node& node, int world_size,
                       Surroundings& around)
    : options_(std::move(options)), node_(node), world_size_(world_size), around_(around) {}

void StallWatch::Due(TimePoint at) { next_ = std::min(next_, at); }

TimePoint StallWatch::LimitOf(TimePoint since) const {
  return std::max(since, resumed_) + options_.stall_limit;
}

void StallWatch::NoteWait(const PendingKey& pending) {
  for (const Duration time : {options_.stall_warning, options_.stall_limit}) {
    // A time before the last step was looked at then.
    if (time > Duration::zero() && pending.since + time > stepped_) Due(pending.since + time);
  }
}

void StallWatch::Step(std::map<SetNumber, SetState>& sets,
                      const std::vector<RunningOperation>& running, TimePoint now) {
  // A job that was stopped as a whole goes on: what it waits for has the limit again.
  if (next_ != TimePoint::max() && now > next_ + options_.peer_timeout) resumed_ = now;
  stepped_ = now;
  next_ = TimePoint::max();
  for (auto& [number, set] : sets) {
    if (set.keys.Oldest()) CheckStalls(set, now);
    if (around_.faulted()) return;
  }
  CheckLeaving(now);
  if (around_.faulted()) return;
  FinishQueries(now);
  CheckRunning(running, now);
}

void StallWatch::Forget(SetNumber set) {
  std::erase_if(queries_, [set](const PassedQuery& query) { return query.answer.key.set == set; });
}

void StallWatch::CheckStalls(SetState& set, TimePoint now) {
  const Duration warning = options_.stall_warning;
  const Duration limit = options_.stall_limit;
  const Duration first = warning > Duration::zero() ? warning : limit;
  if (now < set.stalls.next_check) return Due(set.stalls.next_check);

  // A key that comes later cannot be due before this.
  set.stalls.next_check = first > Duration::zero() ? now + first : TimePoint::max();
  if (set.seat()) {
    std::vector<PendingKey*> waiting = set.keys.Undecided();
    // A key that a child told of came later than it has waited.
    std::stable_sort(waiting.begin(), waiting.end(),
                     [](const PendingKey* a, const PendingKey* b) { return a->since < b->since; });
    Inquire(set, waiting, now);
    if (around_.faulted()) return;
  } else {
    ReportStalls(set, first, now);
  }
  Due(set.stalls.next_check);
}

// All that wait as soon as one has waited for long: the seat makes one warning of them.
void StallWatch::ReportStalls(SetState& set, Duration first, TimePoint now) {
  if (first <= Duration::zero()) return;
  std::vector<PendingKey*> waiting = set.keys.Undecided();
  std::erase_if(waiting, [](const PendingKey* pending) {
    return pending->stall != nullptr && pending->stall->reported;
  });
  bool overdue = false;
  for (const PendingKey* const pending : waiting) {
    overdue |= now - pending->since >= first;
    set.stalls.next_check = std::min(set.stalls.next_check, pending->since + first);
  }
  if (!overdue) return;
  for (PendingKey* const pending : waiting) {
    pending->Stall().reported = true;
    const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(now - pending->since);
    around_.Report(StalledItem{*pending->key, waited.count()});
  }
  set.stalls.next_check = now + first;
}

void StallWatch::NoteTimeOut(SetState& set, PendingKey& pending, Duration limit, TimePoint now) {
  if (set.seat()) {
    // The limit of a call that was late when it was submitted is not zero, which would be none.
    pending.Stall().call_limit = std::max<Duration>(limit, std::chrono::microseconds(1));
    set.stalls.next_check = now;
    Due(now);
    return;
  }
  const auto us = [](Duration d) {
    return std::chrono::duration_cast<std::chrono::microseconds>(d).count();
  };
  around_.Report(StalledItem{*pending.key, us(now - pending.since),
                             std::max<std::int64_t>(us(limit), 1), pending.forwarded});
}

// The seat asks one question at a time, about the key that has waited longest. `waiting`: the
// oldest first.
void StallWatch::Inquire(SetState& set, const std::vector<PendingKey*>& waiting, TimePoint now) {
  const Duration warning = options_.stall_warning;
  const Duration limit = options_.stall_limit;
  TimePoint& next = set.stalls.next_check;
  for (PendingKey* const pending : waiting) {
    if (pending->stall == nullptr || !pending->stall->inquiry) continue;
    const StalledKey::Inquiry& inquiry = *pending->stall->inquiry;
    if (!inquiry.awaited.empty() && now < inquiry.deadline) {
      next = std::min(next, inquiry.deadline);
      return;
    }
    if (!FinishInquiry(set, *pending, waiting, now)) {
      next = now;  // `waiting` holds what is gone
      return;
    }
    if (around_.faulted()) return;
  }
  std::erase_if(set.stalls.next_warning, [&](const auto& late) {
    return std::none_of(waiting.begin(), waiting.end(), [&](const PendingKey* pending) {
      return pending->stall != nullptr && pending->stall->warned &&
             HaveCommon(set.Missing(*pending), {late.first});
    });
  });
  const auto start = [&](PendingKey& pending, bool fault_after) {
    StartInquiry(set, pending, fault_after, now);
    const StalledKey::Inquiry& inquiry = *pending.stall->inquiry;
    next = inquiry.awaited.empty() ? now : inquiry.deadline;
  };
  const auto ask = [&](const auto& which) {
    const auto found = std::find_if(waiting.begin(), waiting.end(), [&](const PendingKey* pending) {
      return pending->stall && which(*pending->stall);
    });
    return found == waiting.end() ? nullptr : *found;
  };
  if (PendingKey* const late =
          ask([](const StalledKey& key) { return key.call_limit > Duration::zero(); })) {
    return start(*late, /*fault_after=*/true);
  }
  if (limit > Duration::zero() && !waiting.empty() && now >= LimitOf(waiting.front()->since)) {
    return start(*waiting.front(), /*fault_after=*/true);
  }
  if (PendingKey* const due = ask([](const StalledKey& key) { return key.to_be_asked; })) {
    start(*due, /*fault_after=*/false);
    due->stall->inquiry->for_circle = true;
    return;
  }
  for (PendingKey* const pending : waiting) {
    if (limit > Duration::zero()) next = std::min(next, LimitOf(pending->since));
    if (warning <= Duration::zero()) continue;
    TimePoint due = pending->since + warning;
    if (now >= due) {
      bool all_known = true;
      for (const int late : set.Missing(*pending)) {
        const auto known = set.stalls.next_warning.find(late);
        all_known &= known != set.stalls.next_warning.end();
        if (known != set.stalls.next_warning.end()) due = std::max(due, known->second);
      }
      if (!all_known || now >= due) return start(*pending, /*fault_after=*/false);
    }
    next = std::min(next, due);
  }
}

void StallWatch::StartInquiry(SetState& set, PendingKey& pending, bool fault_after, TimePoint now) {
  StalledKey& stall = pending.Stall();
  StalledKey::Inquiry inquiry;
  inquiry.deadline = now + options_.ping_interval;
  inquiry.fault_after = fault_after;
  inquiry.call_limit = stall.call_limit;
  inquiry.number = ++questions_;
  inquiry.asked = set.keys.next_order();
  stall.to_be_asked = false;
  for (const int source : set.Missing(pending)) {
    if (source == kSelf) {
      inquiry.missing.Add(options_.rank);
      inquiry.activities.push_back(Activity());
    } else {
      inquiry.awaited.push_back(source);
      around_.SendNow(RankOf(source), QueryMessage{*pending.key, inquiry.number});
    }
  }
  stall.inquiry = std::move(inquiry);
}

// False: nobody knows of the key. Who told of it has seen its decision meanwhile, and it is
// forgotten here.
bool StallWatch::FinishInquiry(SetState& set, PendingKey& pending,
                               const std::vector<PendingKey*>& waiting, TimePoint now) {
  const Key& key = *pending.key;
  StalledKey::Inquiry inquiry = std::move(*pending.stall->inquiry);
  pending.stall->inquiry.reset();
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
  able.Remove(around_.left());
  if (pending.reports == 0 && warning.silent.empty() && warning.missing.ContainsAll(able)) {
    set.keys.Erase(pending);
    return false;
  }
  inquiry.activities = warning.activities;
  NoteHeldUp(set, pending, inquiry);
  if (around_.faulted() || inquiry.for_circle) return true;
  // The next warning of this stall comes after as long again, and not one for each of its keys.
  const std::vector<int> missing = set.Missing(pending);
  for (const int late : missing) set.stalls.next_warning[late] = now + warning.waited;
  for (PendingKey* const other : waiting) {
    if (!HaveCommon(missing, set.Missing(*other))) continue;
    other->Stall().warned = true;
    if (other != &pending) ++warning.others;
  }
  // Everyone may have submitted while the question was under way.
  if (inquiry.call_limit > Duration::zero()) pending.Stall().call_limit = {};
  if (warning.missing.empty() && warning.silent.empty()) return true;
  if (!inquiry.fault_after) {
    warnings_.push_back(std::move(warning));
    return true;
  }
  RankRanges late = warning.missing;
  late.Add(warning.silent);
  if (inquiry.call_limit > Duration::zero()) {
    around_.Fail(StatusCode::kTimedOut,
                 TimeOutText(key, inquiry.call_limit) + "; not submitted by " + RanksText(late) +
                     ActivitiesText(warning.activities),
                 TensorName(key));
    return true;
  }
  around_.Fail(StatusCode::kTimedOut,
               WaitedText(warning) + " for " + RanksText(late) + ", longer than stall_limit (" +
                   DurationText(options_.stall_limit) + ")" + ActivitiesText(warning.activities),
               TensorName(key));
  return true;
}

void StallWatch::Receive(SetState& set, const QueryMessage& asked, TimePoint now) {
  const Key& key = asked.key;
  PassedQuery query;
  query.answer.key = key;
  query.answer.number = asked.number;
  // Half of what the asker waits, so that an answer that is not complete still comes in time.
  query.deadline = now + options_.ping_interval / 2;
  static const PendingKey kNothingReported;
  const PendingKey* pending = set.keys.Find(key);
  if (pending == nullptr || !pending->forwarded) {
    for (const int source : set.Missing(pending ? *pending : kNothingReported)) {
      if (source == kSelf) {
        query.answer.missing.Add(options_.rank);
        query.answer.activities.push_back(Activity());
      } else {
        query.awaited.push_back(source);
        around_.SendNow(RankOf(source), QueryMessage{key, asked.number});
      }
    }
  }
  // A later question about a stall replaces the earlier one; one about what runs is apart.
  std::erase_if(queries_, [&](const PassedQuery& known) {
    return known.answer.key == key && (known.answer.number == 0) == (asked.number == 0);
  });
  queries_.push_back(std::move(query));
  Due(queries_.back().awaited.empty() ? now : queries_.back().deadline);
}

void StallWatch::Receive(SetState& set, int child, AnswerMessage answer, TimePoint now) {
  PendingKey* pending = set.keys.Find(answer.key);
  StalledKey* const stall = pending == nullptr ? nullptr : pending->stall.get();
  if (stall != nullptr && stall->inquiry && stall->inquiry->number == answer.number) {
    std::erase(stall->inquiry->awaited, child);
    stall->inquiry->missing.Add(answer.missing);
    AddActivities(stall->inquiry->activities, std::move(answer.activities));
    if (stall->inquiry->awaited.empty()) {
      set.stalls.next_check = now;
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
    if (query.answer.key != answer.key || query.answer.number != answer.number) continue;
    std::erase(query.awaited, child);
    query.answer.missing.Add(answer.missing);
    AddActivities(query.answer.activities, std::move(answer.activities));
    if (query.awaited.empty()) Due(now);
    return;
  }
}

void StallWatch::FinishQueries(TimePoint now) {
  std::erase_if(queries_, [&](PassedQuery& query) {
    if (!query.awaited.empty() && now < query.deadline) {
      Due(query.deadline);
      return false;
    }
    SetState& set = *around_.FindSet(query.answer.key.set);
    for (const int child : query.awaited) {
      query.answer.missing.Add(set.child_members(child));
      AddActivities(query.answer.activities, {{RankOf(child), "does not answer", {}}});
    }
    around_.SendNow(node_.parent, std::move(query.answer));
    return true;
  });
}

// Waiting in shutdown is a key like any other (18): the root, which everybody's leaving reaches,
// watches.
void StallWatch::CheckLeaving(TimePoint now) {
  if (node_.parent >= 0 || around_.left().empty() || around_.left().Count() == world_size_) return;
  if (!first_left_) first_left_ = now;
  StallWarning warning;
  warning.waited = now - *first_left_;
  warning.leaving = around_.left();
  warning.missing = RankRanges::Span(0, world_size_ - 1);
  warning.missing.Remove(around_.left());
  if (options_.stall_limit > Duration::zero()) {
    if (now >= LimitOf(*first_left_)) {
      around_.Fail(StatusCode::kTimedOut,
                   LeavingText(warning) + ", longer than stall_limit (" +
                       DurationText(options_.stall_limit) + ")",
                   "");
      return;
    }
    Due(LimitOf(*first_left_));
  }
  if (options_.stall_warning <= Duration::zero()) return;
  if (!next_leaving_warning_) next_leaving_warning_ = *first_left_ + options_.stall_warning;
  if (now >= *next_leaving_warning_) {
    next_leaving_warning_ = now + warning.waited;
    warnings_.push_back(std::move(warning));
  }
  Due(*next_leaving_warning_);
}

void StallWatch::Receive(SetState& set, const StalledItem& stalled, TimePoint now) {
  // A bounded age keeps a hostile or broken clock from overflowing ours.
  const auto bounded = [](std::int64_t us) {
    return std::chrono::microseconds(std::clamp<std::int64_t>(us, 0, std::int64_t{1} << 40));
  };
  PendingKey& pending = set.keys.Add(stalled.key, now - bounded(stalled.waited_us));
  const Duration limit = bounded(stalled.limit_us);
  if (limit > Duration::zero()) NoteTimeOut(set, pending, limit, now);
  set.stalls.next_check = now;
  Due(now);
}

}  // namespace sirtaki::core
