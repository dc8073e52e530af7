#include "core/trace/timeline_writer.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "core/threads/leavable_thread.h"
#include "core/trace/trace_files.h"

namespace sirtaki::core::trace {
namespace {

constexpr Duration kShortestInterval = std::chrono::milliseconds(1);

}  // namespace

struct TimelineWriter::Part : LeavableThread {
  Part(ObserverPtr of, TimelineOptions how) : observer(std::move(of)), options(std::move(how)) {}

  void Flush(Duration patience) SIRTAKI_EXCLUDES(mutex);

  // ---- by the thread ----
  void Run() SIRTAKI_EXCLUDES(mutex);
  void FollowUntilStopped() SIRTAKI_EXCLUDES(mutex);
  // Writes what has happened since the last time; returns how many events that were.
  std::uint64_t Follow(bool to_the_end);
  void Fail(const Status& why);

  const ObserverPtr observer;
  const TimelineOptions options;
  std::atomic<bool> failed{false};  // the thread has ended, or is about to
  TimelineFile file;
  std::uint64_t next = observer->recorder.added();  // number of the next event
  TimePoint looked = Clock::now();
  std::vector<Event> events;

  bool runs SIRTAKI_GUARDED_BY(mutex) = true;
  bool flush SIRTAKI_GUARDED_BY(mutex) = false;  // somebody waits for it
};

Status TimelineWriter::Start(TimelineOptions options) {
  MutexLock control(control_);
  if (const auto before = part(); before != nullptr) {
    if (!before->failed) {
      return {StatusCode::kInvalidArgument, "a timeline is being written already, to \"" +
                                                before->options.path +
                                                "\": end it by stop_timeline() first"};
    }
    End();
  }
  Status status = MakeFoldersOf(options.path);
  if (status.ok()) status = SetAside(options.path);  // of a run, an attempt or a part before
  if (!status.ok()) return status;
  const auto part = std::make_shared<Part>(observer_, std::move(options));
  const TimelineOptions& of = part->options;
  status = part->file.Open(of.path, of.identity, of.max_bytes);
  if (!status.ok()) return status;
  observer_->detail = true;  // before the thread, which may find at once that the file is full
  try {
    part->StartThread([part] { part->Run(); }, /*quiet=*/true);
  } catch (const std::system_error& error) {
    observer_->detail = false;
    return {StatusCode::kBackend,
            std::string("the thread for the timeline cannot start: ") + error.what()};
  }
  MutexLock lock(mutex_);
  part_ = part;
  return Status::Ok();
}

void TimelineWriter::Stop() {
  MutexLock control(control_);
  End();
}

void TimelineWriter::End() {
  const auto ended = part();
  if (ended == nullptr) return;
  observer_->detail = false;
  const TimelineOptions& options = ended->options;
  if (!ended->EndThread(options.patience) && options.on_error) {
    options.on_error(StuckFile("the timeline", options.path, options.patience));
  }
  MutexLock lock(mutex_);
  part_ = nullptr;
}

void TimelineWriter::Flush(Duration patience) {
  if (const auto flushed = part(); flushed != nullptr) flushed->Flush(patience);
}

void TimelineWriter::Part::Flush(Duration patience) {
  const TimePoint limit = Clock::now() + patience;
  MutexLock lock(mutex);
  if (!runs) return;
  flush = true;
  changed.NotifyAll();
  while (runs && flush && changed.WaitUntil(mutex, limit)) {
  }
}

void TimelineWriter::Part::Run() {
  pthread_setname_np(pthread_self(), "sirtaki-trace");
  try {
    FollowUntilStopped();
  } catch (const std::exception& error) {  // memory is short
    Fail({StatusCode::kBackend, "the timeline \"" + options.path + "\" ends: " + error.what()});
  }
  MutexLock lock(mutex);
  runs = false;
  changed.NotifyAll();
}

void TimelineWriter::Part::FollowUntilStopped() {
  const Duration shortest = std::min(kShortestInterval, options.interval);
  Duration pause = options.interval;
  bool stops = false;
  while (!stops && file.is_open() && !file.is_full()) {
    bool flushes = false;
    {
      MutexLock lock(mutex);
      const TimePoint until = Clock::now() + pause;
      while (!quits() && !flush && WaitUntil(until)) {
      }
      stops = quits();
      flushes = flush;
    }
    const std::uint64_t written = Follow(/*to_the_end=*/stops);
    if (flushes) {
      MutexLock lock(mutex);
      flush = false;
      changed.NotifyAll();
    }
    const bool fills = written > observer->recorder.capacity() / 4;
    pause = fills ? std::max(pause / 4, shortest) : std::min(2 * pause, options.interval);
  }
  file.Close();
}

std::uint64_t TimelineWriter::Part::Follow(bool to_the_end) {
  events.clear();
  std::uint64_t lost = 0;
  const std::uint64_t from = next;
  next = observer->recorder.Read(from, to_the_end, &events, &lost);
  const TimePoint now = Clock::now();
  if (lost > 0) {
    Event event;
    event.kind = EventKind::kLost;
    event.count = static_cast<std::uint32_t>(std::min<std::uint64_t>(lost, UINT32_MAX));
    event.begin = looked;
    event.end = now;
    event.SetText("events were overwritten before they could be written");
    events.push_back(event);
  }
  looked = now;
  if (Status status = file.Append(events); !status.ok()) Fail(status);
  // A thread that was left behind must not meddle with the timeline of another.
  if (file.is_full()) (void)CallOut([this] { observer->detail = false; });
  return next - from;
}

void TimelineWriter::Part::Fail(const Status& why) {
  file.Close();
  (void)CallOut([&] {
    observer->detail = false;
    failed = true;
    if (options.on_error) options.on_error(why);
  });
}

}  // namespace sirtaki::core::trace
