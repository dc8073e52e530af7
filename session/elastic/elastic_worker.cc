#include "session/elastic/elastic_worker.h"

#include <poll.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "core/machine/start_notice.h"
#include "core/threads/quiet_thread.h"
#include "session/session.h"

namespace sirtaki::session {

using core::Clock;
using core::ElasticNotice;
using core::MutexLock;
using core::Status;
using core::StatusCode;
using core::TimePoint;
using Kind = core::ElasticNotice::Kind;

namespace {

// A process around this one that is held up may have no room for a notice for this long.
constexpr auto kPatience = std::chrono::seconds(5);
constexpr auto kTryAgain = std::chrono::milliseconds(5);
// It is asked again and again, so that it is noticed when it is gone.
constexpr auto kAskAgain = std::chrono::seconds(2);
constexpr int kNoticesATurn = 16;

}  // namespace

bool ElasticWorker::IsOne(const core::EnvironmentView& env) {
  return env.Find(core::kElasticVariable).has_value();
}

ElasticWorker& ElasticWorker::OfProcess() {
  static ElasticWorker& worker = *new ElasticWorker;  // its thread uses it to the end
  return worker;
}

Status ElasticWorker::Open(const core::EnvironmentView& env) {
  if (fd_ >= 0) return Status::Ok();
  const auto to = env.Find(core::kStartNoticeVariable);
  if (!to) {
    return {StatusCode::kBackend,
            "a job that is elastic: " + std::string(core::kStartNoticeVariable) +
                " is not set, which sirtakirun sets: pass it on to the program"};
  }
  to_ = *to;
  std::string own_name;
  fd_ = core::ListenForStart(&own_name);
  if (fd_ < 0) return {StatusCode::kBackend, std::string("no socket: ") + std::strerror(errno)};
  core::StartQuietThread([this] { Listen(); }).detach();
  return Status::Ok();
}

Status ElasticWorker::Tell(const ElasticNotice& notice) const {
  const std::string bytes = core::Encode(notice);
  const TimePoint deadline = Clock::now() + kPatience;
  while (!core::SendNotice(fd_, to_, core::StartNotice::kElastic, bytes)) {
    if (errno != EAGAIN || Clock::now() >= deadline) {
      return {StatusCode::kShutDown,
              std::string("the sirtakirun around this process is gone: ") + std::strerror(errno)};
    }
    std::this_thread::sleep_for(kTryAgain);
  }
  return Status::Ok();
}

Status ElasticWorker::WhyLeft() const { return session_ ? session_->fault() : failed_start_; }

int ElasticWorker::LostRank() const {
  const Status why = WhyLeft();
  // A group that does not begin says whom it has missed in each of these ways.
  const bool has_missed =
      why.code() == StatusCode::kPeerLost ||
      (!session_ && (why.code() == StatusCode::kTimedOut || why.code() == StatusCode::kBackend));
  const int lost = has_missed ? why.origin().rank : -1;
  const bool is_one = lost >= 0 && lost < place_.size && lost != place_.rank;
  return is_one ? lost : -1;
}

Status ElasticWorker::Ask(const core::EnvironmentView& env, Place* place) {
  std::shared_ptr<Session> last;  // ends after the lock
  MutexLock lock(mutex_);
  if (Status status = Open(env); !status.ok()) return status;
  ElasticNotice notice;
  notice.kind = Kind::kAsks;
  notice.generation = place_.generation;
  if (const int lost = LostRank(); lost >= 0) notice.ranks.Add(lost);
  const Status why = WhyLeft();
  notice.text = why.message();
  notice.rank = why.origin().rank + 1;
  last = std::move(session_);
  failed_start_ = Status::Ok();
  is_asking_ = true;
  const int left = place_.generation;
  refused_.clear();
  while (place_.generation == left) {
    if (!refused_.empty()) return {StatusCode::kInvalidArgument, refused_};
    if (Status status = Tell(notice); !status.ok()) return status;
    const TimePoint again = Clock::now() + kAskAgain;
    while (place_.generation == left && refused_.empty() && Clock::now() < again)
      changed_.WaitUntil(mutex_, again);
  }
  is_asking_ = false;
  *place = place_;
  return Status::Ok();
}

void ElasticWorker::TellListens(int port) {
  MutexLock lock(mutex_);
  // A sirtakirun that does not hear it is gone, and this process with it.
  static_cast<void>(Tell({Kind::kListens, place_.generation, 0, 0, port, "", {}}));
}

void ElasticWorker::Enter(const std::shared_ptr<Session>& session) {
  std::string why;
  {
    MutexLock lock(mutex_);
    session_ = session;
    if (is_over()) {
      why = why_over_;
    } else {
      static_cast<void>(Tell({Kind::kJoined, place_.generation, 0, 0, 0, "", {}}));
    }
  }
  if (!why.empty()) session->Abort(why);
}

void ElasticWorker::TellHasState(int root) {
  MutexLock lock(mutex_);
  static_cast<void>(Tell({Kind::kHasState, place_.generation, root + 1, 0, 0, "", {}}));
}

void ElasticWorker::TellCannotGoOn(const std::string& why, int rank) {
  MutexLock lock(mutex_);
  static_cast<void>(Tell({Kind::kCannotGoOn, place_.generation, rank + 1, 0, 0, why, {}}));
}

void ElasticWorker::NoteFailedStart(const Status& why) {
  MutexLock lock(mutex_);
  failed_start_ = why;
}

std::string ElasticWorker::WhyOver() const {
  MutexLock lock(mutex_);
  return is_over() ? why_over_ : "";
}

std::string ElasticWorker::WhyChange() const {
  MutexLock lock(mutex_);
  return to_change_ == place_.generation ? why_change_ : "";
}

std::vector<int> ElasticWorker::LeavingRanks() const {
  MutexLock lock(mutex_);
  return to_change_ == place_.generation ? leaving_.ToVector() : std::vector<int>();
}

int ElasticWorker::generation() const {
  MutexLock lock(mutex_);
  return place_.generation;
}

bool ElasticWorker::BeginTraining() {
  MutexLock lock(mutex_);
  return !std::exchange(has_begun_, true);
}

bool ElasticWorker::has_begun() const {
  MutexLock lock(mutex_);
  return has_begun_;
}

void ElasticWorker::Listen() {
  int fd = -1;
  {
    MutexLock lock(mutex_);
    fd = fd_;
  }
  while (true) {
    pollfd readable{fd, POLLIN, 0};
    if (poll(&readable, 1, -1) != 1) continue;
    for (const auto& heard : core::HearStart(fd, kNoticesATurn)) {
      if (heard.notice != core::StartNotice::kElastic) continue;
      if (const auto notice = core::DecodeElasticNotice(heard.text)) Hear(*notice);
    }
  }
}

void ElasticWorker::Hear(const ElasticNotice& notice) {
  std::shared_ptr<Session> to_abort;
  std::string why;
  {
    MutexLock lock(mutex_);
    if (notice.kind == Kind::kPlace && is_asking_ && notice.generation > place_.generation) {
      const int slot = notice.ranks.empty() ? 0 : notice.ranks.First();
      place_ = {notice.generation, notice.rank, notice.size, notice.text, notice.port, slot};
      changed_.NotifyAll();
    } else if (notice.kind == Kind::kOver && notice.generation == 0 && is_asking_) {
      refused_ = notice.text;
      changed_.NotifyAll();
    } else if (notice.kind == Kind::kChange && notice.generation == place_.generation) {
      to_change_ = notice.generation;
      why_change_ = notice.text;
      leaving_ = notice.ranks;
      static_cast<void>(Tell({Kind::kKnows, notice.generation, 0, 0, 0, "", {}}));
    } else if (notice.kind == Kind::kOver && notice.generation == place_.generation) {
      over_ = notice.generation;
      why = "generation " + std::to_string(notice.generation) + " is over: " + notice.text;
      why_over_ = why;
      to_abort = session_;
      static_cast<void>(Tell({Kind::kHasHeard, notice.generation, 0, 0, 0, "", {}}));
    }
  }
  if (to_abort) to_abort->Abort(why);
}

}  // namespace sirtaki::session
