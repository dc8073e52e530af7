// What a rank has done so far, in numbers: counters that any thread adds to, and how they are
// written. One table says which there are.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/types.h"

namespace sirtaki::core::trace {

enum class Metric : std::uint8_t {
  kSteps,
  kStepTime,
  kBackwardTime,
  kWaitTime,
  kCalls,
  kRefused,
  kGroups,
  kTensors,
  kBytes,
  kNegotiationTime,
  kQueueTime,
  kPackTime,
  kMoveTime,
  kUnpackTime,
  kStalls,
};
inline constexpr std::size_t kMetricCount = 15;

struct MetricSpec {
  Metric id{};
  std::string_view name;  // "steps", "wait_seconds": lower case, as files have it
  std::string_view help;  // a sentence
  bool is_time = false;   // counted in nanoseconds, shown in seconds
};
// In the order of Metric.
std::span<const MetricSpec> MetricTable();

// Since the session began. By kind of collective: the operations, and the bytes that this rank
// gave.
struct Metrics {
  std::array<std::int64_t, kMetricCount> counts{};
  std::array<std::int64_t, kOpKindCount> kind_groups{};
  std::array<std::int64_t, kOpKindCount> kind_bytes{};

  std::int64_t Count(Metric id) const { return counts[static_cast<std::size_t>(id)]; }
  Duration Time(Metric id) const;  // precondition: a time
  // As it is shown: seconds of a time.
  double Value(const MetricSpec& spec) const;
};

// Thread-safe; what one thread adds may be seen in parts.
class MetricCounters {
 public:
  void Add(Metric id, std::int64_t value = 1) {
    counts_[static_cast<std::size_t>(id)].fetch_add(value, std::memory_order_relaxed);
  }
  void Add(Metric id, Duration time);
  // A group of `tensors` tensors, `bytes` together, was moved.
  void AddGroup(OpKind kind, std::int64_t tensors, std::int64_t bytes);
  Metrics Read() const;

 private:
  template <std::size_t kSize>
  using Counts = std::array<std::atomic<std::int64_t>, kSize>;
  Counts<kMetricCount> counts_{};
  Counts<kOpKindCount> kind_groups_{};
  Counts<kOpKindCount> kind_bytes_{};
};

// "unix_seconds,rank,steps,…", and a line of values, without newlines.
std::string MetricsCsvHead();
std::string MetricsCsvLine(const Metrics& metrics, int rank, double unix_seconds);

// The text format of Prometheus, all of it, each sample with the labels rank and host.
// https://prometheus.io/docs/instrumenting/exposition_formats
std::string MetricsPrometheus(const Metrics& metrics, int rank, std::string_view host);

}  // namespace sirtaki::core::trace
