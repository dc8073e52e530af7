#include "core/trace/summary.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string_view>

#include "core/base/rank_ranges.h"

namespace sirtaki::core::trace {
namespace {

// Below these there is too little to judge by.
constexpr std::int64_t kFewestSteps = 10;
constexpr std::int64_t kFewestGroups = 50;  // of a rank
constexpr double kShortestRun = 0.1;        // seconds of steps

// A smaller share of the time is worth no word.
constexpr double kNoticeable = 0.1;
// Ranks are late if they wait for the others this much less than those do who wait the most, and
// noticeably so.
constexpr double kMuchLess = 0.5;
// Below this, communication is as good as not hidden at all.
constexpr double kLittleOverlap = 0.1;
// An operation that moves less at a time is all latency.
constexpr double kSmallGroup = 16.0 * 1024;
constexpr double kFewTensors = 4;

double Seconds(const Metrics& metrics, Metric id) {
  return static_cast<double>(metrics.Count(id)) * 1e-9;
}

double PerCall(const Metrics& metrics, Metric id) {
  const std::int64_t calls = metrics.Count(Metric::kCalls) - metrics.Count(Metric::kMessages);
  return calls == 0 ? 0 : Seconds(metrics, id) / static_cast<double>(calls);
}

// The share is that of the time of steps; none if no step was timed.
std::optional<double> StepShare(const Metrics& metrics, Metric id) {
  const double steps = Seconds(metrics, Metric::kStepTime);
  if (steps <= 0) return std::nullopt;
  return Seconds(metrics, id) / steps;
}

std::string Percent(std::optional<double> share) {
  if (!share) return "-";
  char text[16];
  std::snprintf(text, sizeof text, "%.0f %%", 100 * *share);
  return text;
}

// "12.3 MB": three digits, in the unit in which it is below `per_unit`.
std::string InUnits(double value, double per_unit, std::span<const std::string_view> units) {
  std::size_t unit = 0;
  for (; std::round(value) >= per_unit && unit + 1 < units.size(); ++unit) value /= per_unit;
  const int decimals = unit == 0 || value >= 99.95 ? 0 : value < 9.995 ? 2 : 1;
  char text[48];
  std::snprintf(text, sizeof text, "%.*f ", decimals, value);
  return text + std::string(units[unit]);
}

std::string Bytes(double bytes) {
  constexpr std::array<std::string_view, 5> kUnits = {"B", "kB", "MB", "GB", "TB"};
  return InUnits(bytes, 1000, kUnits);
}

std::string Time(double seconds) {
  constexpr std::array<std::string_view, 3> kUnits = {"us", "ms", "s"};
  return InUnits(1e6 * seconds, 1000, kUnits);
}

// The rank that comes last to the calls finds the others there, and waits for nobody. Where ranks
// take turns in being late, all wait alike, and nobody is to blame.
std::string StragglerAdvice(const std::vector<Metrics>& ranks) {
  std::vector<double> waits;
  for (const Metrics& metrics : ranks) {
    waits.push_back(StepShare(metrics, Metric::kStepAgreementTime).value_or(0));
  }
  const double longest = *std::max_element(waits.begin(), waits.end());
  if (longest < kNoticeable) return {};
  RankRanges late;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (waits[rank] < std::min(kMuchLess * longest, longest - kNoticeable))
      late.Add(static_cast<int>(rank));
  }
  const std::int64_t count = late.Count();
  if (count == 0 || 2 * count > static_cast<std::int64_t>(ranks.size())) return {};
  const bool one = count == 1;
  return "The others wait for " + std::string(one ? "rank " : "ranks ") + late.ToString() +
         ", up to " + Percent(longest) + " of their time: check whether " +
         (one ? "it has" : "they have") + " more work, or a slower or busier machine.";
}

// `all`: of all ranks together, as below.
std::string SmallTensorsAdvice(const Metrics& all, std::size_t ranks) {
  if (all.Count(Metric::kGroups) < kFewestGroups * static_cast<std::int64_t>(ranks)) return {};
  const bool of_steps = all.Count(Metric::kTimedSteps) > 0;
  const double time = Seconds(all, of_steps ? Metric::kStepTime : Metric::kSessionTime);
  const double share =
      Seconds(all, of_steps ? Metric::kStepTransferTime : Metric::kTransferTime) / time;
  if (time < kShortestRun || share < kNoticeable) return {};
  const auto groups = static_cast<double>(all.Count(Metric::kGroups));
  const double bytes = static_cast<double>(all.Count(Metric::kBytes)) / groups;
  const double tensors = static_cast<double>(all.Count(Metric::kTensors)) / groups;
  if (bytes >= kSmallGroup || tensors >= kFewTensors) return {};
  return "Operations are small, " + Bytes(bytes) + " each, and take " + Percent(share) +
         " of the time: pass several tensors to one grouped call, or let fusion_delay gather "
         "more.";
}

std::string OverlapAdvice(const Metrics& all) {
  const double share = StepShare(all, Metric::kStepExposedTime).value_or(0);
  if (Overlap(all).value_or(1) > kLittleOverlap || share < kNoticeable) return {};
  // Where ranks wait for each other rather than for data, less data would not help.
  if (share < StepShare(all, Metric::kStepAgreementTime).value_or(0)) return {};
  return "Hardly any communication overlaps with computation, and the ranks wait for it " +
         Percent(share) +
         " of the time: larger batches, backward_passes_per_step, a smaller first bucket, or "
         "compression would help.";
}

Metrics Sum(const std::vector<Metrics>& ranks) {
  Metrics all;
  for (const Metrics& metrics : ranks) {
    for (std::size_t i = 0; i < kMetricCount; ++i) all.counts[i] += metrics.counts[i];
  }
  return all;
}

}  // namespace

std::vector<std::string> Advice(const std::vector<Metrics>& ranks) {
  std::vector<std::string> advice;
  const auto add = [&advice](std::string text) {
    if (!text.empty()) advice.push_back(std::move(text));
  };
  const Metrics all = Sum(ranks);
  const bool enough_steps = std::all_of(ranks.begin(), ranks.end(), [](const Metrics& metrics) {
    return metrics.Count(Metric::kTimedSteps) >= kFewestSteps &&
           Seconds(metrics, Metric::kStepTime) >= kShortestRun;
  });
  if (enough_steps) {
    add(StragglerAdvice(ranks));
    // Whom one rank keeps waiting has nothing to overlap with.
    if (advice.empty()) add(OverlapAdvice(all));
  }
  add(SmallTensorsAdvice(all, ranks.size()));
  return advice;
}

std::string SummaryText(const std::vector<Metrics>& ranks,
                        const std::vector<std::vector<PipelineTimes>>& pipelines) {
  std::string text =
      "rank     steps   per step   waits  for others  overlap     calls  tensors/group      given  "
      " negotiate       move\n";
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const Metrics& of = ranks[rank];
    const std::int64_t timed = of.Count(Metric::kTimedSteps);
    const auto groups = static_cast<double>(std::max<std::int64_t>(of.Count(Metric::kGroups), 1));
    // Streams wait for what a device moves, not the program.
    const bool on_host = of.Count(Metric::kDeviceGroups) == 0;
    const std::optional<double> waits =
        on_host ? StepShare(of, Metric::kStepWaitTime) : std::nullopt;
    const std::string per_step =
        timed == 0 ? "-" : Time(Seconds(of, Metric::kStepTime) / static_cast<double>(timed));
    char line[200];
    std::snprintf(line, sizeof line, "%4zu %9lld %10s %7s %11s %8s %9lld %14.1f %10s %11s %10s\n",
                  rank, static_cast<long long>(of.Count(Metric::kSteps)), per_step.c_str(),
                  Percent(waits).c_str(),
                  Percent(StepShare(of, Metric::kStepAgreementTime)).c_str(),
                  Percent(Overlap(of)).c_str(), static_cast<long long>(of.Count(Metric::kCalls)),
                  static_cast<double>(of.Count(Metric::kTensors)) / groups,
                  Bytes(static_cast<double>(of.Count(Metric::kBytes))).c_str(),
                  Time(PerCall(of, Metric::kNegotiationTime)).c_str(),
                  Time(Seconds(of, Metric::kMoveTime) / groups).c_str());
    text += line;
  }
  text += PipelinesText(pipelines);
  for (const std::string& advice : Advice(ranks)) text += advice + "\n";
  return text;
}

}  // namespace sirtaki::core::trace
