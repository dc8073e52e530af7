#include "core/trace/timeline_writer.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <string>
#include <system_error>
#include <utility>

#include "core/threads/quiet_thread.h"
#include "core/trace/trace_files.h"

namespace sirtaki::core::trace {
namespace {

constexpr Duration kShortestInterval = std::chrono::milliseconds(1);

}  // namespace

Status TimelineWriter::Start(TimelineOptions options) {
  MutexLock control(control_);
  if (failed_.exchange(false)) {
    thread_.join();
    thread_ = {};
  }
  if (thread_.joinable()) {
    return {StatusCode::kInvalidArgument, "a timeline is being written already, to \"" +
                                              options_.path +
                                              "\": end it by stop_timeline() first"};
  }
  Status status = MakeFoldersOf(options.path);
  if (status.ok()) status = SetAside(options.path);  // of a run, an attempt or a part before
  if (!status.ok()) return status;
  if (status = file_.Open(options.path, options.identity, options.max_bytes); !status.ok()) {
    return status;
  }
  options_ = std::move(options);
  next_ = observer_->recorder.added();
  looked_ = Clock::now();
  {
    MutexLock lock(mutex_);
    stop_ = false;
    runs_ = true;
  }
  observer_->detail = true;  // before the thread, which may find at once that the file is full
  try {
    thread_ = StartQuietThread([this] { Run(); });
  } catch (const std::system_error& error) {
    MutexLock lock(mutex_);
    observer_->detail = false;
    runs_ = false;
    file_.Close();
    return {StatusCode::kBackend,
            std::string("the thread for the timeline cannot start: ") + error.what()};
  }
  return Status::Ok();
}

void TimelineWriter::Stop() {
  MutexLock control(control_);
  if (!thread_.joinable()) return;
  observer_->detail = false;
  {
    MutexLock lock(mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
  thread_ = {};
  Follow(/*to_the_end=*/true);
  file_.Close();
  failed_ = false;
}

void TimelineWriter::Flush(Duration patience) {
  const TimePoint limit = Clock::now() + patience;
  MutexLock lock(mutex_);
  if (!runs_) return;
  flush_ = true;
  changed_.NotifyAll();
  while (runs_ && flush_ && changed_.WaitUntil(mutex_, limit)) {
  }
}

void TimelineWriter::Run() {
  pthread_setname_np(pthread_self(), "sirtaki-trace");
  try {
    FollowUntilStopped();
  } catch (const std::exception& error) {  // memory is short
    Fail({StatusCode::kBackend, "the timeline \"" + options_.path + "\" ends: " + error.what()});
  }
  MutexLock lock(mutex_);
  runs_ = false;
  changed_.NotifyAll();
}

void TimelineWriter::FollowUntilStopped() {
  const Duration shortest = std::min(kShortestInterval, options_.interval);
  Duration pause = options_.interval;
  while (file_.is_open() && !file_.is_full()) {
    bool flush = false;
    {
      MutexLock lock(mutex_);
      const TimePoint until = Clock::now() + pause;
      while (!stop_ && !flush_ && changed_.WaitUntil(mutex_, until)) {
      }
      if (stop_) return;
      flush = flush_;
    }
    const std::uint64_t events = Follow(/*to_the_end=*/false);
    if (flush) {
      MutexLock lock(mutex_);
      flush_ = false;
      changed_.NotifyAll();
    }
    const bool fills = events > observer_->recorder.capacity() / 4;
    pause = fills ? std::max(pause / 4, shortest) : std::min(2 * pause, options_.interval);
  }
}

std::uint64_t TimelineWriter::Follow(bool to_the_end) {
  if (!file_.is_open()) return 0;
  events_.clear();
  std::uint64_t lost = 0;
  const std::uint64_t from = next_;
  next_ = observer_->recorder.Read(from, to_the_end, &events_, &lost);
  const TimePoint now = Clock::now();
  if (lost > 0) {
    Event event;
    event.kind = EventKind::kLost;
    event.count = static_cast<std::uint32_t>(std::min<std::uint64_t>(lost, UINT32_MAX));
    event.begin = looked_;
    event.end = now;
    event.SetText("events were overwritten before they could be written");
    events_.push_back(event);
  }
  looked_ = now;
  if (Status status = file_.Append(events_); !status.ok()) Fail(status);
  if (file_.is_full()) observer_->detail = false;
  return next_ - from;
}

void TimelineWriter::Fail(const Status& why) {
  observer_->detail = false;
  failed_ = true;
  file_.Close();
  if (options_.on_error) options_.on_error(why);
}

}  // namespace sirtaki::core::trace
