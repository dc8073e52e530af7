#include "core/trace/metrics.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

namespace sirtaki::core::trace {
namespace {

constexpr std::array<MetricSpec, kMetricCount> kTable = {{
    {Metric::kSteps, "steps", "Steps of optimizers."},
    {Metric::kStepTime, "step_seconds", "Time from the end of a step to the end of the next.",
     true},
    {Metric::kTimedSteps, "timed_steps",
     "Steps whose time is in step_seconds: all but a session's first."},
    {Metric::kBackwardTime, "backward_seconds",
     "Time of steps from the first gradient to the beginning of step().", true},
    {Metric::kStepWaitTime, "step_wait_seconds",
     "Part of step_seconds in which the program stood still for communication.", true},
    {Metric::kStepTransferTime, "step_transfer_seconds",
     "Part of step_seconds in which an operation on host memory was under way.", true},
    {Metric::kStepExposedTime, "step_exposed_seconds",
     "Part of step_seconds in which both was so: the program waited for data.", true},
    {Metric::kStepAgreementTime, "step_agreement_seconds",
     "Part of step_wait_seconds in which nothing was under way and a call awaited other ranks.",
     true},
    {Metric::kSessionTime, "session_seconds", "Time since init().", true},
    {Metric::kWaitTime, "wait_seconds",
     "Time that the program stood still for communication: in step(), synchronize() and blocking "
     "calls.",
     true},
    {Metric::kTransferTime, "transfer_seconds",
     "Time that an operation on host memory was under way; several at once count once.", true},
    {Metric::kExposedTime, "exposed_seconds",
     "Part of wait_seconds that is in transfer_seconds too: the program waited for data.", true},
    {Metric::kAgreementTime, "agreement_seconds",
     "Part of wait_seconds in which nothing was under way and a call awaited other ranks.", true},
    {Metric::kCalls, "calls", "Calls that the program made, a bucket of gradients as one."},
    {Metric::kMessages, "messages", "Calls that were sends or receives: they are not negotiated."},
    {Metric::kRefused, "refused_calls",
     "Calls that failed because the ranks asked for different things."},
    {Metric::kGroups, "groups", "Operations that moved data, each of tensors that went together."},
    {Metric::kDeviceGroups, "device_groups", "Operations that a GPU carried out."},
    {Metric::kTensors, "tensors", "Tensors in all operations."},
    {Metric::kBytes, "bytes", "Bytes that this rank gave to operations."},
    {Metric::kNegotiationTime, "negotiation_seconds",
     "Time from a call until all ranks had made it and this one knew; calls overlap.", true},
    {Metric::kQueueTime, "queue_seconds",
     "Time from the end of negotiation until the operation's turn; operations overlap.", true},
    {Metric::kPackTime, "pack_seconds",
     "Time that tensors were copied together, converted and scaled.", true},
    {Metric::kMoveTime, "move_seconds", "Time that data was moved and reduced.", true},
    {Metric::kUnpackTime, "unpack_seconds", "Time that results were copied to their tensors.",
     true},
    {Metric::kStalls, "stall_warnings", "Stall warnings that this rank gave."},
}};

constexpr double kNanosecond = 1e-9;

std::optional<double> Quotient(double value, std::int64_t count) {
  if (count == 0) return std::nullopt;
  return value / static_cast<double>(count);
}

template <Metric kTime>
std::optional<double> TimePerStep(const Metrics& metrics) {
  return Quotient(static_cast<double>(metrics.Count(kTime)) * kNanosecond,
                  metrics.Count(Metric::kTimedSteps));
}

std::optional<double> BytesPerStep(const Metrics& metrics) {
  return Quotient(static_cast<double>(metrics.Count(Metric::kBytes)),
                  metrics.Count(Metric::kSteps));
}

// Files have ratios besides the sums: how it went since they were written last.
struct RatioSpec {
  std::string_view name;  // "step_seconds": files put "recent_" before it
  std::string_view help;
  std::optional<double> (*of)(const Metrics& metrics) = nullptr;  // none: nothing to divide by
};

constexpr std::array<RatioSpec, 6> kRatios = {{
    {"step_seconds", "The time of a step.", TimePerStep<Metric::kStepTime>},
    {"step_wait_seconds", "The time of a step in which the program stood still for communication.",
     TimePerStep<Metric::kStepWaitTime>},
    {"step_transfer_seconds",
     "The time of a step in which an operation on host memory was under way.",
     TimePerStep<Metric::kStepTransferTime>},
    {"step_bytes", "Bytes that this rank gave to operations in a step.", BytesPerStep},
    {"overlap", "The share of transfer time in which the program went on.", Overlap},
    {"fusion_efficiency", "The share of operations that fusion saved: 1 - groups / tensors.",
     FusionEfficiency},
}};

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
  std::string name;  // "steps_total"
  std::string_view help;
  std::string_view type = "counter";
};

void AppendHead(const Family& family, std::string* text) {
  *text += "# HELP sirtaki_" + family.name + " " + std::string(family.help) + "\n# TYPE sirtaki_" +
           family.name + " " + std::string(family.type) + "\n";
}

void AppendSample(const Family& family, const std::string& labels, const std::string& value,
                  std::string* text) {
  *text += "sirtaki_" + family.name + "{" + labels + "} " + value + "\n";
}

}  // namespace

std::span<const MetricSpec> MetricTable() { return kTable; }

std::optional<double> Overlap(const Metrics& metrics) {
  if (metrics.Count(Metric::kDeviceGroups) > 0) return std::nullopt;
  const bool of_steps = metrics.Count(Metric::kTimedSteps) > 0;
  const auto exposed =
      Quotient(static_cast<double>(
                   metrics.Count(of_steps ? Metric::kStepExposedTime : Metric::kExposedTime)),
               metrics.Count(of_steps ? Metric::kStepTransferTime : Metric::kTransferTime));
  if (!exposed) return std::nullopt;
  return 1 - *exposed;
}

std::optional<double> FusionEfficiency(const Metrics& metrics) {
  const auto alone = Quotient(static_cast<double>(metrics.Count(Metric::kGroups)),
                              metrics.Count(Metric::kTensors));
  if (!alone) return std::nullopt;
  return 1 - *alone;
}

Metrics Metrics::operator-(const Metrics& before) const {
  Metrics since;
  const auto subtract = [](const auto& of, const auto& from, auto* to) {
    std::transform(of.begin(), of.end(), from.begin(), to->begin(), std::minus<>());
  };
  subtract(counts, before.counts, &since.counts);
  subtract(kind_groups, before.kind_groups, &since.kind_groups);
  subtract(kind_bytes, before.kind_bytes, &since.kind_bytes);
  return since;
}

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
  if (kind != OpKind::kBarrier) {
    Add(Metric::kGroups);
    Add(Metric::kTensors, tensors);
    Add(Metric::kBytes, bytes);
  }
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
  const TimePoint now = Clock::now();
  const CommunicationClock::Times times = communication_.Read(now);
  read(counts_, &metrics.counts);
  read(kind_groups_, &metrics.kind_groups);
  read(kind_bytes_, &metrics.kind_bytes);
  const auto add = [&metrics](Metric id, Duration time) {
    metrics.counts[static_cast<std::size_t>(id)] += std::chrono::nanoseconds(time).count();
  };
  add(Metric::kSessionTime, now - begin_);
  add(Metric::kWaitTime, times.wait);
  add(Metric::kTransferTime, times.transfer);
  add(Metric::kExposedTime, times.exposed);
  add(Metric::kAgreementTime, times.agreement);
  return metrics;
}

std::string MetricsCsvHead() {
  std::string text = "unix_seconds,rank";
  for (const MetricSpec& spec : kTable) text += "," + std::string(spec.name);
  for (const RatioSpec& spec : kRatios) text += ",recent_" + std::string(spec.name);
  return text;
}

std::string MetricsCsvLine(const MetricsReport& report, double unix_seconds) {
  char time[40];
  std::snprintf(time, sizeof time, "%.3f", unix_seconds);
  std::string text = time + ("," + std::to_string(report.rank));
  for (const MetricSpec& spec : kTable) text += "," + Number(report.total.Value(spec));
  for (const RatioSpec& spec : kRatios) {
    const std::optional<double> ratio = spec.of(report.recent);
    text += ",";
    if (ratio) text += Number(*ratio);
  }
  return text;
}

std::string MetricsPrometheus(const MetricsReport& report, std::string_view host) {
  const Metrics& total = report.total;
  const std::string labels =
      "rank=\"" + std::to_string(report.rank) + "\",host=\"" + Label(host) + "\"";
  std::string text;
  for (const MetricSpec& spec : kTable) {
    const Family family{std::string(spec.name) + "_total", spec.help};
    AppendHead(family, &text);
    AppendSample(family, labels, Number(total.Value(spec)), &text);
  }
  for (const RatioSpec& spec : kRatios) {
    const std::optional<double> ratio = spec.of(report.recent);
    if (!ratio) continue;
    const Family family{"recent_" + std::string(spec.name), spec.help, "gauge"};
    AppendHead(family, &text);
    AppendSample(family, labels, Number(*ratio), &text);
  }
  const auto append_kinds = [&](const Family& family, const auto& counts) {
    AppendHead(family, &text);
    for (std::size_t kind = 0; kind < counts.size(); ++kind) {
      if (total.kind_groups[kind] == 0) continue;
      AppendSample(family,
                   labels + ",kind=\"" + std::string(OpKindName(static_cast<OpKind>(kind))) + "\"",
                   std::to_string(counts[kind]), &text);
    }
  };
  append_kinds({"collectives_total", "Operations by kind."}, total.kind_groups);
  append_kinds({"collective_bytes_total", "Bytes that this rank gave to operations, by kind."},
               total.kind_bytes);
  return text;
}

}  // namespace sirtaki::core::trace
