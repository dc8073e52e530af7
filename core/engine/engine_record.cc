// An engine tells of itself when something has gone wrong.
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "core/base/text.h"
#include "core/engine/engine.h"

namespace sirtaki::core {
namespace {

constexpr Duration kTokenPause = std::chrono::milliseconds(1);

// WhatText stands before the key. A group may have hundreds of tensors: how many does.
std::string WhatText(const Asked& asked) {
  const SignaturePtr& signature = CollectiveOf(asked);
  if (signature == nullptr || signature->parts.empty()) return AskedText(asked);
  return std::string(OpKindName(signature->kind)) + " of the " +
         std::to_string(signature->parts.size()) + " tensors of";
}

// It is among the last things that a rank does.
TimePoint LeftSince(const trace::FlightRecord& record) {
  for (auto event = record.events.rbegin(); event != record.events.rend(); ++event) {
    if (event->kind == trace::EventKind::kLeave) return event->begin;
  }
  return record.now;
}

}  // namespace

bool Engine::TakeTokenWithin(Duration patience) const {
  const TimePoint limit = Clock::now() + patience;
  while (!token_.TryLock()) {
    if (Clock::now() >= limit) return false;
    std::this_thread::sleep_for(kTokenPause);
  }
  return true;
}

trace::FlightRecord Engine::Describe(Duration patience) const {
  trace::FlightRecord record;
  record.rank = options_.rank;
  record.host = options_.host;
  const TensorQueue::Account account = queue_.GiveAccount();
  std::vector<std::pair<SetNumber, RankRanges>> sets;
  std::vector<RunningOperation> running;
  bool leaving = false;
  if (TakeTokenWithin(patience)) {
    const MutexLock lock(token_, std::adopt_lock);
    sets = negotiator_.MemberSets();
    leaving = negotiator_.leaving();
    running = fault_.failed() ? running_at_fault_ : executor_.Running();
    record.doing = doing_at_fault_;
  } else {
    record.missing = "the members of its process sets, because its engine was busy or stuck";
    for (const auto& [set, calls] : account.calls) sets.emplace_back(set, RankRanges());
    running = executor_.Running();
  }
  for (auto& [set, members] : sets) {
    const auto calls = account.calls.find(set);
    record.sets.push_back({set, std::move(members),
                           calls == account.calls.end() ? 0 : calls->second,
                           account.joined.contains(set)});
  }
  for (const TensorQueue::Account::Call& call : account.pending) {
    const bool is_join = call.key.is_join();
    record.pending.push_back({call.key.set, call.key.ToString(),
                              is_join ? std::string() : WhatText(call.asked), call.number,
                              call.submitted});
  }
  for (RunningOperation& operation : running) {
    record.running.push_back({operation.set, std::move(operation.what), operation.since});
  }
  if (options_.observer != nullptr) {
    options_.observer->recorder.Read(0, /*to_the_end=*/true, &record.events, &record.lost);
    if (record.doing.empty()) record.doing = options_.observer->doing.Text(Now());
  }
  record.fault = fault();
  record.now = Now();
  if (leaving) record.leaving = LeftSince(record);
  return record;
}

std::optional<Key> Engine::WaitsFor() const {
  const HandleState* const handle = sits_in_.handle;
  const TimePoint since{Duration(sits_in_.since)};
  if (handle == nullptr || Now() - since < options_.sits_after) return {};
  if (!callers_.AtMostOne() || queue_.HasMore()) return {};
  return queue_.KeyOf(handle);
}

std::string Engine::Activity() const SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  const TimePoint now = Now();
  if (options_.observer != nullptr) {
    // Its calls are parts of that.
    std::string doing = options_.observer->doing.Text(now);
    if (!doing.empty()) return doing;
  }
  std::string text = "has submitted nothing yet";
  if (last_submission_) {
    text = "last submitted " + last_submission_->key.ToString() + " " +
           DurationText(now - last_submission_->at) + " ago";
  }
  if (const std::uint64_t last = last_submission_ ? last_submission_->step : 0; last > 0) {
    const std::uint64_t step = options_.step();
    text += ", in step " + std::to_string(last);
    text += step == last ? ", which is not over" : ", and is in step " + std::to_string(step);
  }
  const std::vector<RunningOperation> running = executor_.Running();
  if (!running.empty()) {
    text += ", runs " + running.front().what + " for " + DurationText(now - running.front().since);
  }
  return options_.in_words ? options_.in_words(text) : text;
}

}  // namespace sirtaki::core
