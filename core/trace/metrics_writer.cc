#include "core/trace/metrics_writer.h"

#include <pthread.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>

#include "core/trace/trace_files.h"

namespace sirtaki::core::trace {

Status MetricsWriter::Start(MetricsFileOptions options) {
  options_ = std::move(options);
  failed_ = false;
  Status status =
      IsPrometheus(options_.path) ? Write() : ReplaceFile(options_.path, MetricsCsvHead() + "\n");
  if (!status.ok()) return status;
  {
    MutexLock lock(mutex_);
    stop_ = false;
  }
  thread_ = std::thread([this] { Run(); });
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
  for (bool last = false; !last && !failed_;) {
    {
      MutexLock lock(mutex_);
      const TimePoint until = Clock::now() + options_.interval;
      while (!stop_ && changed_.WaitUntil(mutex_, until)) {
      }
      last = stop_;
    }
    if (Status status = Write(); !status.ok()) {
      failed_ = true;
      if (options_.on_error) options_.on_error(status);
    }
  }
}

Status MetricsWriter::Write() {
  const Metrics metrics = observer_->metrics.Read();
  if (IsPrometheus(options_.path)) {
    return ReplaceFile(options_.path, MetricsPrometheus(metrics, options_.rank, options_.host));
  }
  const std::chrono::duration<double> unix = std::chrono::system_clock::now().time_since_epoch();
  errno = 0;
  std::ofstream file(options_.path, std::ios::app);
  file << MetricsCsvLine(metrics, options_.rank, unix.count()) << "\n";
  file.close();
  if (file) return Status::Ok();
  return {StatusCode::kBackend,
          "the metrics \"" + options_.path + "\" cannot be written: " + std::strerror(errno)};
}

}  // namespace sirtaki::core::trace
