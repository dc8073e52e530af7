#include "launch/elastic/job_news.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/base/text.h"
#include "launch/elastic/membership_texts.h"
#include "launch/job/failure_judgement.h"

namespace sirtaki::launch {

using core::DurationText;
using core::TimePoint;

namespace {

using NoteKind = GenerationNote::Kind;

// The time after which a line tells what the job waits for, and after which it is told again.
constexpr auto kSilence = std::chrono::seconds(5);
constexpr auto kTellAgain = std::chrono::seconds(60);

}  // namespace

void JobNews::TellDecided(int generation, const std::vector<Generation::Member>& members,
                          TimePoint now) {
  Say("generation " + std::to_string(generation) + ": " + MembersText(members));
  decided_ = generation;
  decided_at_ = now;
  GenerationNote note{.kind = NoteKind::kDecided, .generation = generation, .at = now};
  for (const Generation::Member& member : members) {
    note.workers.push_back(member.worker);
    note.on.push_back(member.host);
  }
  history_.Write(std::move(note));
}

void JobNews::TellJoined(int generation, TimePoint now) {
  std::string since;
  if (over_at_ != TimePoint::max()) {
    since = ", " + DurationText(now - over_at_) +
            " after the one before: " + DurationText(decided_at_ - over_at_) + " to leave that, " +
            DurationText(now - decided_at_) + " to join";
  }
  Say("generation " + std::to_string(generation) + " has begun" + since);
  history_.Write({.kind = NoteKind::kJoined, .generation = generation, .at = now});
  joined_at_ = now;
  over_at_ = TimePoint::max();
}

void JobNews::TellTrains(int generation, WorkerId with_state_of, TimePoint now) {
  Say("generation " + std::to_string(generation) + " trains, " + DurationText(now - joined_at_) +
      " later, with the state of worker " + std::to_string(with_state_of));
  history_.Write({.kind = NoteKind::kTrains, .generation = generation, .at = now});
}

void JobNews::NoteFailure(TimePoint now) { over_at_ = std::min(over_at_, now); }

void JobNews::TellOver(int generation, const std::string& why, TimePoint now) {
  if (generation == 0 || std::exchange(told_over_, generation) == generation) return;
  NoteFailure(now);
  NoteOver(generation, why, over_at_);
  Say("generation " + std::to_string(generation) + " is over: " + why);
}

void JobNews::NoteOver(int generation, const std::string& why, TimePoint at) {
  history_.Write({.kind = NoteKind::kOver, .generation = generation, .at = at, .text = why});
}

void JobNews::NoteEnd(int generation, const std::string& why, TimePoint at) {
  history_.Write({.kind = NoteKind::kEnded,
                  .generation = generation,
                  .at = at,
                  .text = why.empty() ? "the program has ended" : why});
}

void JobNews::TellLeft(const Generation::Member& worker, const std::string& how, TimePoint now) {
  Say(NameOf(worker.worker, worker.host) + " " + how);
  history_.Write({.kind = NoteKind::kLeft,
                  .generation = decided_,
                  .at = now,
                  .host = worker.host,
                  .workers = {worker.worker},
                  .text = how});
}

std::string JobNews::HowItEnded(const Generation::Member& worker, const EndMessage& end,
                                int* code) const {
  const auto failure =
      JudgeEnd(worker.worker, worker.host, end, output_.LastErrorLines(worker.worker));
  *code = failure ? failure->code : 0;
  return failure ? failure->how : EndText(end);
}

void JobNews::TellWaits(const Membership::Wait& wait, const std::vector<Membership::LeftOut>& hosts,
                        TimePoint now) {
  std::string about = wait.what;
  for (const auto& host : hosts) about += "; " + host.host;
  if (about.empty()) {
    tell_wait_at_ = TimePoint::max();
  } else if (about != waits_for_) {
    tell_wait_at_ = std::min<TimePoint>(tell_wait_at_, now + kSilence);
  }
  waits_for_ = about;
  if (now < tell_wait_at_) return;
  // A job that trains, and leaves a host out for good, says so once.
  const bool is_for_good = wait.what.empty() && std::ranges::all_of(hosts, [](const auto& host) {
                             return host.until == TimePoint::max();
                           });
  tell_wait_at_ = is_for_good ? TimePoint::max() : now + kTellAgain;
  const auto time_to = [now](TimePoint until) {
    return DurationText(std::chrono::ceil<std::chrono::seconds>(until - now));
  };
  std::string text;
  if (!wait.what.empty()) text = "waiting for " + wait.what;
  if (!wait.what.empty() && wait.until != TimePoint::max()) {
    text += ", at most " + time_to(wait.until) + " more";
  }
  for (const auto& host : hosts) {
    text += (text.empty() ? "host " : "; host ") + host.host + " gets no worker";
    if (host.until != TimePoint::max()) text += " for " + time_to(host.until) + " more";
    text += ": " + host.why;
  }
  Say(text);
}

}  // namespace sirtaki::launch
