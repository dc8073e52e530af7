#include "frameworks/observation.h"

#include <utility>

#include "core/log.h"
#include "core/trace/trace_files.h"

namespace sirtaki::frameworks {

using core::Status;
namespace trace = core::trace;

namespace {

// The folder of the records of `auto`; ranks that are threads of a process leave none.
constexpr std::string_view kFolder = "sirtaki-records";
// What is still to be written to a timeline when a signal ends the process.
constexpr auto kFlushPatience = std::chrono::milliseconds(500);

void Warn(const Status& why) { core::Log(core::LogLevel::kWarning, why.message()); }

// Empty: none are written.
std::string RecordFolder(const core::Config& config, bool is_process) {
  if (config.flight_records == core::kNoFlightRecords) return {};
  if (config.flight_records != core::kAutoFlightRecords) return config.flight_records;
  return std::string(is_process ? kFolder : "");
}

}  // namespace

Observation::Observation(trace::ObserverPtr observer, Options options)
    : observer_(std::move(observer)),
      options_(std::move(options)),
      steps_(observer_),
      timeline_(observer_),
      metrics_(observer_) {}

Observation::~Observation() { End(); }

void Observation::Begin() {
  const core::Config& config = options_.config;
  if (!config.timeline.empty()) {
    if (Status status = StartTimeline(config.timeline); !status.ok()) Warn(status);
  }
  if (!config.metrics_file.empty()) {
    const Status status =
        metrics_.Start({.path = trace::MetricsPath(config.metrics_file, options_.topology.rank),
                        .rank = options_.topology.rank,
                        .host = options_.topology.host,
                        .interval = config.metrics_interval,
                        .on_error = Warn});
    if (!status.ok()) Warn(status);
  }
  if (!RecordFolder(config, options_.is_process).empty()) {
    records_ = RecordKeeper::Register([this](const std::string& why) { WriteRecord(why); });
  }
}

void Observation::End() {
  if (records_) records_->End();
  timeline_.Stop();
  metrics_.Stop();
}

void Observation::NoteFault() {
  if (records_ && !fault_noted_.exchange(true)) records_->Ask("the group has failed");
}

Status Observation::StartTimeline(const std::string& path) {
  const std::string file = trace::TimelinePath(path, options_.topology.rank);
  if (file.empty()) return Status::Ok();
  if (Status status = trace::MakeFoldersOf(file); !status.ok()) return status;
  return timeline_.Start({.path = file,
                          .identity = {.rank = options_.topology.rank,
                                       .host = options_.topology.host,
                                       .offset = options_.offset,
                                       .origin = options_.origin},
                          .max_bytes = options_.config.timeline_bytes,
                          .on_error = Warn});
}

void Observation::Mark(std::string_view text, core::TimePoint begin, core::TimePoint end) {
  trace::Event event;
  event.kind = trace::EventKind::kMark;
  event.thread = trace::ThisThreadNumber();
  event.begin = begin;
  event.end = end;
  event.SetText(text);
  observer_->recorder.Add(event);
}

void Observation::NoteBuckets(const std::shared_ptr<const BucketNames>& names) {
  const core::TimePoint now = core::Clock::now();
  for (const auto& [key, held] : *names) Mark(key + " holds " + held, now, now);
  core::MutexLock lock(mutex_);
  std::erase_if(buckets_, [](const auto& known) { return known.expired(); });
  buckets_.push_back(names);
}

std::string Observation::KeyText(const std::string& key) const {
  core::MutexLock lock(mutex_);
  for (const auto& known : buckets_) {
    const auto names = known.lock();
    if (names == nullptr) continue;
    const auto found = names->find(key);
    if (found != names->end()) return key + " (" + found->second + ")";
  }
  return key;
}

void Observation::WriteRecord(const std::string& why) {
  const std::string path = trace::FlightRecordPath(
      RecordFolder(options_.config, options_.is_process), options_.topology.rank);
  const Status status = trace::ReplaceFile(path, trace::FlightRecordToJson(options_.describe(why)));
  timeline_.Flush(kFlushPatience);
  if (!status.ok()) return Warn(status);
  core::Log(core::LogLevel::kInfo, "wrote the flight record " + path + " (" + why +
                                       "); sirtakirun --explain reads those of all ranks");
}

}  // namespace sirtaki::frameworks
