#include "core/trace/metrics.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace sirtaki::core::trace {
namespace {

constexpr std::array<MetricSpec, kMetricCount> kTable = {{
    {Metric::kSteps, "steps", "Steps of optimizers."},
    {Metric::kStepTime, "step_seconds", "From the end of a step to the end of the next.", true},
    {Metric::kBackwardTime, "backward_seconds",
     "Of steps: from the first gradient to the beginning of step().", true},
    {Metric::kWaitTime, "wait_seconds",
     "The program stood still for communication: in step(), synchronize() and blocking calls.",
     true},
    {Metric::kCalls, "calls", "Calls that the program made, a bucket of gradients as one."},
    {Metric::kRefused, "refused_calls",
     "Calls that failed since the ranks asked for different things."},
    {Metric::kGroups, "groups", "Operations that moved data, each of tensors that went together."},
    {Metric::kTensors, "tensors", "Tensors in them."},
    {Metric::kBytes, "bytes", "What this rank gave to them."},
    {Metric::kNegotiationTime, "negotiation_seconds",
     "From a call until all ranks had made it and this one knew; calls overlap.", true},
    {Metric::kQueueTime, "queue_seconds",
     "From then until the operation's turn; operations overlap.", true},
    {Metric::kPackTime, "pack_seconds", "Tensors were copied together, converted and scaled.",
     true},
    {Metric::kMoveTime, "move_seconds", "Data was moved and reduced.", true},
    {Metric::kUnpackTime, "unpack_seconds", "Results were copied to their tensors.", true},
    {Metric::kStalls, "stall_warnings", "Warnings of stalls that this rank made."},
}};

constexpr double kNanosecond = 1e-9;

std::string Number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.15g", value);
  return text;
}

// A label's value: only these three have to be escaped.
std::string Label(std::string_view value) {
  std::string text;
  for (const char c : value) {
    if (c == '\\' || c == '"') text += '\\';
    if (c == '\n') {
      text += "\\n";
    } else {
      text += c;
    }
  }
  return text;
}

struct Family {
  std::string_view name;
  std::string_view help;
};

void AppendHead(const Family& family, std::string* text) {
  *text += "# HELP sirtaki_" + std::string(family.name) + "_total " + std::string(family.help) +
           "\n# TYPE sirtaki_" + std::string(family.name) + "_total counter\n";
}

void AppendSample(std::string_view name, const std::string& labels, const std::string& value,
                  std::string* text) {
  *text += "sirtaki_" + std::string(name) + "_total{" + labels + "} " + value + "\n";
}

}  // namespace

std::span<const MetricSpec> MetricTable() { return kTable; }

Duration Metrics::Time(Metric id) const {
  return std::chrono::duration_cast<Duration>(std::chrono::nanoseconds(Count(id)));
}

double Metrics::Value(const MetricSpec& spec) const {
  const auto count = static_cast<double>(Count(spec.id));
  return spec.is_time ? count * kNanosecond : count;
}

void MetricCounters::Add(Metric id, Duration time) {
  const std::int64_t count = std::chrono::nanoseconds(time).count();
  Add(id, std::max<std::int64_t>(count, 0));
}

void MetricCounters::AddGroup(OpKind kind, std::int64_t tensors, std::int64_t bytes) {
  Add(Metric::kGroups);
  Add(Metric::kTensors, tensors);
  Add(Metric::kBytes, bytes);
  const auto at = static_cast<std::size_t>(kind);
  kind_groups_[at].fetch_add(1, std::memory_order_relaxed);
  kind_bytes_[at].fetch_add(bytes, std::memory_order_relaxed);
}

Metrics MetricCounters::Read() const {
  const auto read = [](const auto& from, auto* to) {
    std::transform(from.begin(), from.end(), to->begin(),
                   [](const auto& count) { return count.load(std::memory_order_relaxed); });
  };
  Metrics metrics;
  read(counts_, &metrics.counts);
  read(kind_groups_, &metrics.kind_groups);
  read(kind_bytes_, &metrics.kind_bytes);
  return metrics;
}

std::string MetricsCsvHead() {
  std::string text = "unix_seconds,rank";
  for (const MetricSpec& spec : kTable) text += "," + std::string(spec.name);
  return text;
}

std::string MetricsCsvLine(const Metrics& metrics, int rank, double unix_seconds) {
  char time[40];
  std::snprintf(time, sizeof time, "%.3f", unix_seconds);
  std::string text = time + ("," + std::to_string(rank));
  for (const MetricSpec& spec : kTable) text += "," + Number(metrics.Value(spec));
  return text;
}

std::string MetricsPrometheus(const Metrics& metrics, int rank, std::string_view host) {
  const std::string labels = "rank=\"" + std::to_string(rank) + "\",host=\"" + Label(host) + "\"";
  std::string text;
  for (const MetricSpec& spec : kTable) {
    AppendHead({spec.name, spec.help}, &text);
    AppendSample(spec.name, labels, Number(metrics.Value(spec)), &text);
  }
  const auto append_kinds = [&](const Family& family, const auto& counts) {
    AppendHead(family, &text);
    for (std::size_t kind = 0; kind < counts.size(); ++kind) {
      if (metrics.kind_groups[kind] == 0) continue;
      AppendSample(family.name,
                   labels + ",kind=\"" + std::string(OpKindName(static_cast<OpKind>(kind))) + "\"",
                   std::to_string(counts[kind]), &text);
    }
  };
  append_kinds({"collectives", "Operations that moved data, by kind."}, metrics.kind_groups);
  append_kinds({"collective_bytes", "What this rank gave to them, by kind."}, metrics.kind_bytes);
  return text;
}

}  // namespace sirtaki::core::trace
