// Writes a rank's metrics to a file at an interval: a thread that sleeps in between.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/trace/observer.h"

namespace sirtaki::core::trace {

struct MetricsFileOptions {
  std::string path;  // with the ending .prom the text format of Prometheus, else CSV
  int rank = 0;
  std::string host;
  Duration interval = std::chrono::seconds(10);
  // The file could not be written; it is tried again at the next interval. Called once until it
  // could, on the writer's thread.
  std::function<void(const Status& why)> on_error;
};

// Start and Stop are called by one thread at a time.
class MetricsWriter {
 public:
  explicit MetricsWriter(ObserverPtr observer) : observer_(std::move(observer)) {}
  ~MetricsWriter() { Stop(); }
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  // A CSV that is there is replaced. Precondition: not started. Errors: the file cannot be written.
  Status Start(MetricsFileOptions options);
  // The file has the numbers of now when this returns. Idempotent.
  void Stop() SIRTAKI_EXCLUDES(mutex_);

 private:
  void Run() SIRTAKI_EXCLUDES(mutex_);
  // No exception leaves the thread.
  void WriteOrTell() noexcept;
  Status WriteOrThrown();
  Status Write();
  Status AppendLine(const std::string& line) const;

  const ObserverPtr observer_;
  MetricsFileOptions options_;
  Metrics written_;  // what the file has
  bool failing_ = false;
  std::thread thread_;

  Mutex mutex_;
  CondVar changed_;
  bool stop_ SIRTAKI_GUARDED_BY(mutex_) = false;
};

}  // namespace sirtaki::core::trace
