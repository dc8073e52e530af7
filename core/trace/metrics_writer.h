// Writes a rank's metrics to a file at an interval: a thread that sleeps in between.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/trace/observer.h"
#include "core/trace/trace_files.h"

namespace sirtaki::core::trace {

struct MetricsFileOptions {
  std::string path;  // with the ending .prom the text format of Prometheus, else CSV
  int rank = 0;
  std::string host;
  Duration interval = std::chrono::seconds(10);
  // The file could not be written; it is tried again at the next interval. Called once until it
  // could, on the writer's thread; and in Stop, if that leaves the file as it is.
  std::function<void(const Status& why)> on_error;
  // Stop waits this long for a file system that does not answer.
  Duration patience = kFilePatience;
};

// Thread-safe.
class MetricsWriter {
 public:
  explicit MetricsWriter(ObserverPtr observer) : observer_(std::move(observer)) {}
  ~MetricsWriter() { Stop(); }
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  // A CSV that is there is replaced. Precondition: not started. Errors: the file cannot be written.
  Status Start(MetricsFileOptions options) SIRTAKI_EXCLUDES(control_);
  // The file has the numbers of now when this returns, or on_error has been told why not.
  // Idempotent.
  void Stop() SIRTAKI_EXCLUDES(control_);

 private:
  struct File;  // what the thread refers to

  const ObserverPtr observer_;
  Mutex control_;                                            // held for all of Start and Stop
  std::shared_ptr<File> file_ SIRTAKI_GUARDED_BY(control_);  // null: not started
};

}  // namespace sirtaki::core::trace
