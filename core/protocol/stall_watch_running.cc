// An operation may be agreed on and not end, though everybody answers: the second half of (18).
#include <algorithm>
#include <utility>

#include "core/base/text.h"
#include "core/protocol/stall_watch.h"

namespace sirtaki::core {

// CheckRunning looks at the oldest that runs: what is younger may be queued behind it. Any rank for
// which it takes too long fails the group; its seat alone warns.
void StallWatch::CheckRunning(const std::vector<RunningOperation>& local, TimePoint now) {
  const auto front = std::find_if(local.begin(), local.end(),
                                  [](const auto& running) { return running.key.has_value(); });
  if (front == local.end()) {
    oldest_running_.reset();
    running_inquiry_.reset();
    return;
  }
  const bool is_new = !oldest_running_ || oldest_running_->key != *front->key ||
                      oldest_running_->submitted != front->since;
  if (is_new) {
    oldest_running_ = OldestRunning{*front->key, front->since, now, {}, {}};
    running_inquiry_.reset();
  }
  if (LimitRunning(now)) return;
  if (running_inquiry_) {
    if (!running_inquiry_->awaited.empty() && now < running_inquiry_->deadline) {
      return Due(running_inquiry_->deadline);
    }
    FinishRunningInquiry(now);
  }
  SetState* const set = around_.FindSet(front->set);
  if (set != nullptr && set->seat()) InquireRunning(*set, now);
}

// True: a fault was raised.
bool StallWatch::LimitRunning(TimePoint now) {
  if (options_.stall_limit <= Duration::zero()) return false;
  OldestRunning& oldest = *oldest_running_;
  const TimePoint limit = oldest.since + options_.stall_limit;
  if (now < limit) {
    Due(limit);
    return false;
  }
  // Where the whole job was stopped and goes on, it may end now.
  if (!oldest.overdue_since) oldest.overdue_since = now;
  const TimePoint end = *oldest.overdue_since + options_.peer_timeout;
  if (now < end) {
    Due(end);
    return false;
  }
  around_.Fail(StatusCode::kTimedOut,
               oldest.key.ToString() + " is agreed on and has not ended for " +
                   DurationText(now - oldest.since) + ", longer than stall_limit (" +
                   DurationText(options_.stall_limit) + "); rank " + std::to_string(options_.rank) +
                   ": " + options_.activity(),
               TensorName(oldest.key));
  return true;
}

void StallWatch::InquireRunning(SetState& set, TimePoint now) {
  OldestRunning& oldest = *oldest_running_;
  if (options_.stall_warning <= Duration::zero()) return;
  const TimePoint due = oldest.next_warning.value_or(oldest.since + options_.stall_warning);
  if (now < due) return Due(due);
  oldest.next_warning = now + (now - oldest.since);
  RunningInquiry inquiry;
  inquiry.deadline = now + options_.ping_interval;
  if (set.self_member()) inquiry.activities.push_back(Activity());
  for (const int child : set.children()) {
    inquiry.awaited.push_back(child);
    around_.SendNow(RankOf(child), QueryMessage{oldest.key, 0});
  }
  running_inquiry_ = std::move(inquiry);
  Due(running_inquiry_->awaited.empty() ? now : running_inquiry_->deadline);
}

void StallWatch::FinishRunningInquiry(TimePoint now) {
  StallWarning warning;
  warning.key = oldest_running_->key;
  warning.agreed = true;
  warning.waited = now - oldest_running_->since;
  warning.activities = std::move(running_inquiry_->activities);
  const SetState* const set = around_.FindSet(warning.key.set);
  for (const int child : running_inquiry_->awaited) {
    if (set != nullptr) warning.silent.Add(set->child_members(child));
  }
  running_inquiry_.reset();
  warnings_.push_back(std::move(warning));
}

}  // namespace sirtaki::core
