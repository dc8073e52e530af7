#include "core/trace/metrics_writer.h"

#include <pthread.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "core/threads/quiet_thread.h"
#include "core/trace/trace_files.h"

namespace sirtaki::core::trace {

Status MetricsWriter::Start(MetricsFileOptions options) {
  options_ = std::move(options);
  written_ = {};
  failing_ = false;
  Status status;
  if (IsPrometheus(options_.path)) {
    status = Write();
  } else {
    status = SetAside(options_.path);  // of a run or an attempt before
    if (status.ok()) status = ReplaceFile(options_.path, MetricsCsvHead() + "\n");
  }
  if (!status.ok()) return status;
  {
    MutexLock lock(mutex_);
    stop_ = false;
  }
  try {
    thread_ = StartQuietThread([this] { Run(); });
  } catch (const std::system_error& error) {
    return {StatusCode::kBackend,
            std::string("the thread for metrics cannot start: ") + error.what()};
  }
  return status;
}

void MetricsWriter::Stop() {
  if (!thread_.joinable()) return;
  {
    MutexLock lock(mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
  thread_ = {};
}

void MetricsWriter::Run() {
  pthread_setname_np(pthread_self(), "sirtaki-metrics");
  for (bool last = false; !last;) {
    {
      MutexLock lock(mutex_);
      const TimePoint until = Clock::now() + options_.interval;
      while (!stop_ && changed_.WaitUntil(mutex_, until)) {
      }
      last = stop_;
    }
    WriteOrTell();
  }
}

void MetricsWriter::WriteOrTell() noexcept {
  try {
    const Status status = WriteOrThrown();
    const bool tell = !status.ok() && !failing_;
    failing_ = !status.ok();
    if (tell && options_.on_error) options_.on_error(status);
  } catch (...) {
    failing_ = true;  // and cannot even be told
  }
}

// Memory may be short, and what a file system does is anybody's guess.
Status MetricsWriter::WriteOrThrown() {
  try {
    return Write();
  } catch (const std::exception& error) {
    return {StatusCode::kBackend,
            "the metrics \"" + options_.path + "\" cannot be written: " + error.what()};
  }
}

Status MetricsWriter::Write() {
  MetricsReport report;
  report.rank = options_.rank;
  report.total = observer_->metrics.Read();
  report.recent = report.total - written_;
  const std::chrono::duration<double> unix = std::chrono::system_clock::now().time_since_epoch();
  Status status = IsPrometheus(options_.path)
                      ? ReplaceFile(options_.path, MetricsPrometheus(report, options_.host))
                      : AppendLine(MetricsCsvLine(report, unix.count()));
  if (status.ok()) written_ = report.total;
  return status;
}

// A line that only a part of could be written is taken back: the next one stands for itself. A file
// that somebody has taken away begins anew.
Status MetricsWriter::AppendLine(const std::string& line) const {
  errno = 0;
  std::ofstream file(options_.path, std::ios::app | std::ios::ate);
  const auto before = static_cast<std::int64_t>(file.tellp());
  if (before == 0) file << MetricsCsvHead() << "\n";
  file << line << "\n";
  file.close();
  if (file) return Status::Ok();
  Status status(StatusCode::kBackend,
                "the metrics \"" + options_.path + "\" cannot be written: " + std::strerror(errno));
  std::error_code none;
  if (before >= 0) {
    std::filesystem::resize_file(options_.path, static_cast<std::uintmax_t>(before), none);
  }
  return status;
}

}  // namespace sirtaki::core::trace
