// A session hands an observer down to all who have something to tell of what they do. Where it is
// null, nothing is recorded and no clock is read for it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/trace/doing.h"
#include "core/trace/metrics.h"
#include "core/trace/pipeline_times.h"
#include "core/trace/recorder.h"

namespace sirtaki::core::trace {

// Thread-safe.
struct Observer {
  static constexpr std::size_t kEvents = 8192;  // a megabyte

  explicit Observer(std::size_t events = kEvents) : recorder(events) {}

  Recorder recorder;
  MetricCounters metrics;
  PipelineTotals pipelines;
  Doing doing;
  // Whether the phases of each group (packing, moving, unpacking) are recorded as well: while a
  // timeline is written. Their times are counted always.
  std::atomic<bool> detail{false};
};

// Shared: a data thread that a session leaves behind goes on telling.
using ObserverPtr = std::shared_ptr<Observer>;

// The number of the calling thread, from 1, in the order in which the threads first asked.
std::uint32_t ThisThreadNumber();

}  // namespace sirtaki::core::trace
