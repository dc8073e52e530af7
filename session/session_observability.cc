#include "session/session_observability.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <regex>
#include <system_error>
#include <utility>

#include "core/base/log.h"
#include "core/trace/trace_files.h"

namespace sirtaki::session {

using core::Status;
namespace trace = core::trace;

namespace {

// The signal of whoever wants a record of a run that goes on.
constexpr std::string_view kAsks = "SIGUSR1";
// A timeline has this time for what is still to be written when a signal ends the process.
constexpr auto kFlushPatience = std::chrono::milliseconds(500);

// The names of this many layouts of buckets are kept.
constexpr std::size_t kMostLayouts = 64;

void Warn(const Status& why) { core::Log(core::LogLevel::kWarning, why.message()); }

// The warning is for what an option asks for.
void WarnWithout(std::string_view what, const Status& why) {
  core::Log(core::LogLevel::kWarning,
            "the run goes on without " + std::string(what) + ": " + why.message());
}

// Where a path of the options leads, whatever folder the program goes to later.
std::string Absolute(const std::string& path) {
  std::error_code error;
  const std::filesystem::path absolute = std::filesystem::absolute(path, error);
  return path.empty() || error ? path : absolute.string();
}

// Empty: none are written. Ranks that are threads of a process leave none.
std::string RecordFolder(const core::Config& config, bool is_process) {
  if (config.flight_records == core::kNoFlightRecords) return {};
  if (config.flight_records != core::kAutoFlightRecords) return config.flight_records;
  return std::string(is_process ? trace::kRecordFolder : "");
}

std::string RecordPath(const SessionObservability::Options& options) {
  const std::string folder = RecordFolder(options.config, options.is_process);
  return folder.empty() ? folder : trace::FlightRecordPath(Absolute(folder), options.topology.rank);
}

}  // namespace

SessionObservability::SessionObservability(trace::ObserverPtr observer, Options options)
    : observer_(std::move(observer)),
      options_(std::move(options)),
      record_path_(RecordPath(options_)),
      only_if_asked_(options_.topology.size == 1 &&
                     options_.config.flight_records == core::kAutoFlightRecords),
      steps_(observer_),
      timeline_(observer_),
      metrics_(observer_) {}

SessionObservability::~SessionObservability() { static_cast<void>(End()); }

void SessionObservability::Begin() {
  const core::Config& config = options_.config;
  if (!config.timeline.empty()) {
    if (Status status = StartTimeline(config.timeline); !status.ok()) {
      WarnWithout("a timeline", status);
    }
  }
  if (!config.metrics_file.empty()) {
    const Status status = metrics_.Start(
        {.path = trace::MetricsPath(Absolute(config.metrics_file), options_.topology.rank),
         .rank = options_.topology.rank,
         .host = options_.topology.host,
         .interval = config.metrics_interval,
         .on_error = Warn});
    if (!status.ok()) WarnWithout("a metrics file", status);
  }
  if (record_path_.empty()) return;
  if (!only_if_asked_) SetRecordsAside();
  auto records = RecordKeeper::Register([this](const std::string& why) { WriteRecord(why); });
  core::MutexLock lock(mutex_);
  records_ = std::move(records);
}

void SessionObservability::SetRecordsAside() const {
  // Those of an earlier run would be taken for this one's, and of one of more ranks for the last.
  const auto set_aside = [](const std::string& path) {
    if (Status status = trace::SetAside(path); !status.ok()) Warn(status);
  };
  set_aside(record_path_);
  if (options_.topology.rank == 0) {
    const std::string folder = std::filesystem::path(record_path_).parent_path().string();
    std::error_code none;
    for (int rank = options_.topology.size;; ++rank) {
      const std::string path = trace::FlightRecordPath(folder, rank);
      if (!std::filesystem::exists(path, none)) break;
      set_aside(path);
    }
  }
}

bool SessionObservability::End() {
  std::shared_ptr<RecordKeeper::Registration> records;
  {
    core::MutexLock lock(mutex_);
    records = records_;
  }
  {
    core::MutexLock lock(timeline_mutex_);
    ended_ = true;
  }
  const bool written = !records || records->End();
  timeline_.Stop();
  metrics_.Stop();
  return written;
}

void SessionObservability::NoteFault() {
  core::MutexLock lock(mutex_);
  if (records_ && !fault_noted_) records_->Ask("the group has failed");
  fault_noted_ = records_ != nullptr;
}

Status SessionObservability::StartTimeline(const std::string& path) {
  const std::string file = Absolute(trace::TimelinePath(path, options_.topology.rank));
  if (file.empty()) return Status::Ok();
  core::MutexLock lock(timeline_mutex_);
  if (ended_) return {core::StatusCode::kNotInitialized, "called after shutdown()"};
  return timeline_.Start({.path = file,
                          .identity = {.rank = options_.topology.rank,
                                       .host = options_.topology.host,
                                       .offset = options_.offset,
                                       .origin = options_.origin,
                                       .session = options_.session},
                          .max_bytes = options_.config.timeline_bytes,
                          .on_error = Warn});
}

void SessionObservability::Mark(std::string_view text, core::TimePoint begin, core::TimePoint end) {
  trace::Event event;
  event.kind = trace::EventKind::kMark;
  event.thread = trace::ThisThreadNumber();
  event.begin = begin;
  event.end = end;
  event.SetText(text);
  observer_->recorder.Add(event);
}

void SessionObservability::SetLastWords(std::function<void()> say) {
  core::MutexLock lock(words_mutex_);
  last_words_ = std::move(say);
}

// Under the lock: whoever said them may be gone when another's call of this has returned.
void SessionObservability::SayLastWords() {
  core::MutexLock lock(words_mutex_);
  if (const auto say = std::exchange(last_words_, nullptr)) say();
}

void SessionObservability::NoteBuckets(const std::shared_ptr<const BucketNames>& names) {
  const core::TimePoint now = core::Clock::now();
  for (const auto& [key, held] : *names) {
    // The text begins with the first name: an event has little room.
    Mark(key + " holds " + held.substr(std::min(held.find('"'), held.size())), now, now);
  }
  core::MutexLock lock(mutex_);
  buckets_.push_back(names);
  if (buckets_.size() > kMostLayouts) buckets_.pop_front();
}

const std::string* SessionObservability::Held(const std::string& key) const {
  for (const auto& names : buckets_) {
    const auto found = names->find(key);
    if (found != names->end()) return &found->second;
  }
  return nullptr;
}

std::string SessionObservability::KeyText(const std::string& key) const {
  core::MutexLock lock(mutex_);
  const std::string* const held = Held(key);
  return held == nullptr ? key : key + " (" + *held + ")";
}

std::string SessionObservability::InWords(const std::string& text) const {
  if (text.find("bucket ") == std::string::npos) return text;
  // Never destroyed: the engine runs while the program exits.
  static const auto& kKey = *new std::regex(
      "bucket [0-9]+ of arena [0-9]+(, layout [0-9]+( since join [0-9]+)?)?"
      "( of process set [0-9]+)?");
  // What follows where a key is a subject.
  constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kVerbs = {
      {{" has waited", " have waited"},
       {" is agreed on and has not", " are agreed on and have not"}}};
  core::MutexLock lock(mutex_);
  std::string words;
  auto from = text.begin();
  for (std::sregex_iterator key(text.begin(), text.end(), kKey), end; key != end; ++key) {
    const std::string* const held = Held(key->str());
    if (held == nullptr) continue;
    words.append(from, (*key)[0].first);
    words += *held;
    from = (*key)[0].second;
    if (!held->starts_with("the gradients")) continue;
    const std::string_view rest(text.data() + (from - text.begin()),
                                static_cast<std::size_t>(text.end() - from));
    for (const auto& [one, many] : kVerbs) {
      if (!rest.starts_with(one)) continue;
      words += many;
      from += static_cast<std::ptrdiff_t>(one.size());
      break;
    }
  }
  return words.append(from, text.end());
}

void SessionObservability::WriteRecord(const std::string& why) {
  const bool asked = why == kAsks;
  if (only_if_asked_ && !asked) return timeline_.Flush(kFlushPatience);
  Status status;
  int fault_rank = -1;  // where it began, if something has failed
  try {
    const trace::FlightRecord record = options_.describe(why);
    fault_rank = record.fault.origin().rank;
    status = trace::ReplaceFile(record_path_, trace::FlightRecordToJson(record));
  } catch (const std::exception& error) {  // memory is short: that may be what has gone wrong
    status = {core::StatusCode::kBackend,
              "\"" + record_path_ + "\" cannot be written: " + error.what()};
  }
  timeline_.Flush(kFlushPatience);
  if (!status.ok()) return WarnWithout("a flight record", status);
  // One rank tells of all, the lowest that is likely to be alive; and once, though the signal that
  // ends a rank after a fault has it write again.
  const int teller = fault_rank == 0 && options_.topology.size > 1 ? 1 : 0;
  const bool tells = options_.topology.rank == teller && (asked || !std::exchange(told_, true));
  core::Log(tells ? core::LogLevel::kWarning : core::LogLevel::kInfo,
            "wrote the flight record " + record_path_ + " (" + why +
                "); to read those of all ranks in words: sirtakirun --explain " +
                std::filesystem::path(record_path_).parent_path().string());
}

}  // namespace sirtaki::session
