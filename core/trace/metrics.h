// Metrics are what a rank has done so far, in numbers: counters that any thread adds to, and how
// they are written. One table says which there are.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/base/types.h"
#include "core/trace/communication_clock.h"

namespace sirtaki::core::trace {

enum class Metric : std::uint8_t {
  kSteps,
  kStepTime,
  kTimedSteps,
  kBackwardTime,
  kStepWaitTime,
  kStepTransferTime,
  kStepExposedTime,
  kStepAgreementTime,
  kSessionTime,
  kWaitTime,
  kTransferTime,
  kExposedTime,
  kAgreementTime,
  kCalls,
  kMessages,
  kRefused,
  kGroups,
  kDeviceGroups,
  kTensors,
  kBytes,
  kNegotiationTime,
  kQueueTime,
  kPackTime,
  kMoveTime,
  kUnpackTime,
  kStalls,
};
inline constexpr std::size_t kMetricCount = 26;

struct MetricSpec {
  Metric id{};
  std::string_view name;  // "steps", "wait_seconds": lower case, as files have it
  std::string_view help;  // a sentence
  bool is_time = false;   // counted in nanoseconds, shown in seconds
};
// The table is in the order of Metric.
std::span<const MetricSpec> MetricTable();

// Metrics count since the session began, or over a time in between. By kind of collective: the
// operations, and the bytes that this rank gave.
struct Metrics {
  std::array<std::int64_t, kMetricCount> counts{};
  std::array<std::int64_t, kOpKindCount> kind_groups{};
  std::array<std::int64_t, kOpKindCount> kind_bytes{};

  // The difference is what has come since `before`.
  Metrics operator-(const Metrics& before) const;
  std::int64_t Count(Metric id) const { return counts[static_cast<std::size_t>(id)]; }
  Duration Time(Metric id) const;  // precondition: a time
  // The value as it is shown; a time in seconds.
  double Value(const MetricSpec& spec) const;
};

// The share of the time in which data was under way on this rank in which its program went on: of
// the time of steps, or of all where no step was timed. None without a transfer, and none where a
// device moved data: its streams wait then, and how long is not known.
std::optional<double> Overlap(const Metrics& metrics);
// The share of the operations that fusion saved: 0 if each tensor went alone, 0.9 of ten together.
std::optional<double> FusionEfficiency(const Metrics& metrics);

// Thread-safe; what one thread adds may be seen in parts.
class MetricCounters {
 public:
  void Add(Metric id, std::int64_t value = 1) {
    counts_[static_cast<std::size_t>(id)].fetch_add(value, std::memory_order_relaxed);
  }
  void Add(Metric id, Duration time);
  // A group of `tensors` tensors, `bytes` together, was moved. A barrier, which moves nothing, is
  // counted by kind alone.
  void AddGroup(OpKind kind, std::int64_t tensors, std::int64_t bytes);
  // The clock has the times of kWaitTime, kTransferTime, kExposedTime and kAgreementTime.
  CommunicationClock& communication() { return communication_; }
  Metrics Read() const;

 private:
  template <std::size_t kSize>
  using Counts = std::array<std::atomic<std::int64_t>, kSize>;
  Counts<kMetricCount> counts_{};
  Counts<kOpKindCount> kind_groups_{};
  Counts<kOpKindCount> kind_bytes_{};
  CommunicationClock communication_;
  const TimePoint begin_ = Clock::now();
};

// A report is what is written at a time. `recent`: since what was written before.
struct MetricsReport {
  Metrics total;
  Metrics recent;
  int rank = 0;
};

// "unix_seconds,rank,steps,…,recent_overlap,…", and a line of values, without newlines. Ratios that
// there are none of are empty.
std::string MetricsCsvHead();
std::string MetricsCsvLine(const MetricsReport& report, double unix_seconds);

// The text format of Prometheus, all of it, each sample with the labels rank and host.
// https://prometheus.io/docs/instrumenting/exposition_formats
std::string MetricsPrometheus(const MetricsReport& report, std::string_view host);

}  // namespace sirtaki::core::trace
