#include "core/trace/metrics_writer.h"

#include <pthread.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "core/threads/leavable_thread.h"
#include "core/trace/trace_files.h"

namespace sirtaki::core::trace {

struct MetricsWriter::File : LeavableThread {
  File(ObserverPtr of, MetricsFileOptions how) : observer(std::move(of)), options(std::move(how)) {}

  void Run() SIRTAKI_EXCLUDES(mutex);
  // No exception leaves the thread.
  void WriteOrTell() noexcept;
  Status WriteOrThrown();
  Status Write();
  Status AppendLine(const std::string& line) const;

  const ObserverPtr observer;
  const MetricsFileOptions options;
  Metrics written;  // what the file has
  bool failing = false;
};

Status MetricsWriter::Start(MetricsFileOptions options) {
  const MutexLock control(control_);
  const auto file = std::make_shared<File>(observer_, std::move(options));
  const std::string& path = file->options.path;
  Status status;
  if (IsPrometheus(path)) {
    status = file->Write();
  } else {
    status = SetAside(path);  // of a run or an attempt before
    if (status.ok()) status = ReplaceFile(path, MetricsCsvHead() + "\n");
  }
  if (!status.ok()) return status;
  try {
    file->StartThread([file] { file->Run(); }, /*quiet=*/true);
  } catch (const std::system_error& error) {
    return {StatusCode::kBackend,
            std::string("the thread for metrics cannot start: ") + error.what()};
  }
  file_ = file;
  return status;
}

void MetricsWriter::Stop() {
  const MutexLock control(control_);
  const auto file = std::exchange(file_, nullptr);
  if (file == nullptr) return;
  const MetricsFileOptions& options = file->options;
  if (!file->EndThread(options.patience) && options.on_error) {
    options.on_error(StuckFile("the metrics", options.path, options.patience));
  }
}

void MetricsWriter::File::Run() {
  pthread_setname_np(pthread_self(), "sirtaki-metrics");
  for (bool last = false; !last;) {
    {
      MutexLock lock(mutex);
      const TimePoint until = Clock::now() + options.interval;
      while (!quits() && WaitUntil(until)) {
      }
      last = quits();
    }
    WriteOrTell();
  }
}

void MetricsWriter::File::WriteOrTell() noexcept {
  try {
    const Status status = WriteOrThrown();
    const bool tell = !status.ok() && !failing;
    failing = !status.ok();
    if (tell && options.on_error) (void)CallOut([&] { options.on_error(status); });
  } catch (...) {
    failing = true;  // and cannot even be told
  }
}

// Memory may be short, and what a file system does is anybody's guess.
Status MetricsWriter::File::WriteOrThrown() {
  try {
    return Write();
  } catch (const std::exception& error) {
    return {StatusCode::kBackend,
            "the metrics \"" + options.path + "\" cannot be written: " + error.what()};
  }
}

Status MetricsWriter::File::Write() {
  MetricsReport report;
  report.rank = options.rank;
  report.total = observer->metrics.Read();
  report.recent = report.total - written;
  const std::chrono::duration<double> unix = std::chrono::system_clock::now().time_since_epoch();
  Status status = IsPrometheus(options.path)
                      ? ReplaceFile(options.path, MetricsPrometheus(report, options.host))
                      : AppendLine(MetricsCsvLine(report, unix.count()));
  if (status.ok()) written = report.total;
  return status;
}

// A line that only a part of could be written is taken back: the next one stands for itself. A file
// that somebody has taken away begins again.
Status MetricsWriter::File::AppendLine(const std::string& line) const {
  errno = 0;
  std::ofstream file(options.path, std::ios::app | std::ios::ate);
  const auto before = static_cast<std::int64_t>(file.tellp());
  if (before == 0) file << MetricsCsvHead() << "\n";
  file << line << "\n";
  file.close();
  if (file) return Status::Ok();
  Status status(StatusCode::kBackend,
                "the metrics \"" + options.path + "\" cannot be written: " + std::strerror(errno));
  std::error_code none;
  if (before >= 0) {
    std::filesystem::resize_file(options.path, static_cast<std::uintmax_t>(before), none);
  }
  return status;
}

}  // namespace sirtaki::core::trace
