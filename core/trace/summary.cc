#include "core/trace/summary.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <string_view>

namespace sirtaki::core::trace {
namespace {

// Below these there is too little to judge by.
constexpr std::int64_t kFewestSteps = 10;
constexpr std::int64_t kFewestCalls = 50;
constexpr double kShortestRun = 0.1;  // seconds of steps

// Waiting for others is worth a word from this share of the time of steps on.
constexpr double kNoticeableWait = 0.1;
// A rank is behind if its calls wait for others this much less than the median rank's do.
constexpr double kMuchShorter = 0.25;
// What moves less at a time is all latency.
constexpr double kSmallGroup = 16.0 * 1024;
constexpr double kFewTensors = 4;

double Seconds(const Metrics& metrics, Metric id) {
  return static_cast<double>(metrics.Count(id)) * 1e-9;
}

double PerCall(const Metrics& metrics, Metric id) {
  const std::int64_t calls = metrics.Count(Metric::kCalls);
  return calls == 0 ? 0 : Seconds(metrics, id) / static_cast<double>(calls);
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string Percent(double share) {
  char text[16];
  std::snprintf(text, sizeof text, "%.0f %%", 100 * share);
  return text;
}

// "12.3 MB"
std::string Bytes(double bytes) {
  constexpr std::array<std::string_view, 5> kUnits = {"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  for (; bytes >= 1000 && unit + 1 < kUnits.size(); ++unit) bytes /= 1000;
  char text[32];
  std::snprintf(text, sizeof text, "%.3g ", bytes);
  return text + std::string(kUnits[unit]);
}

// The share of its communication in which a rank did something else; -1 if there was none.
double Overlap(const Metrics& metrics) {
  const double busy = Seconds(metrics, Metric::kPackTime) + Seconds(metrics, Metric::kMoveTime) +
                      Seconds(metrics, Metric::kUnpackTime);
  if (busy <= 0) return -1;
  return std::clamp(1 - Seconds(metrics, Metric::kWaitTime) / busy, 0.0, 1.0);
}

// Not all waiting was in steps.
double WaitShare(const Metrics& metrics) {
  const double steps = Seconds(metrics, Metric::kStepTime);
  return steps < kShortestRun ? 0 : std::min(1.0, Seconds(metrics, Metric::kWaitTime) / steps);
}

// Who comes last to every call: its own calls find the others there.
std::string StragglerAdvice(const std::vector<Metrics>& ranks) {
  if (ranks.size() < 2) return {};
  std::vector<double> waits;
  for (const Metrics& metrics : ranks) {
    waits.push_back(PerCall(metrics, Metric::kNegotiationTime));
  }
  const double usual = Median(waits);
  const auto least = std::min_element(waits.begin(), waits.end());
  const auto rank = static_cast<std::size_t>(least - waits.begin());
  double share = 0;
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    if (other != rank) share = std::max(share, WaitShare(ranks[other]));
  }
  if (ranks.size() == 2) {
    // Of two there is no usual one.
    if (*least >= kMuchShorter * *std::max_element(waits.begin(), waits.end())) return {};
  } else if (*least >= kMuchShorter * usual) {
    return {};
  }
  if (share < kNoticeableWait) return {};
  return "The others wait for rank " + std::to_string(rank) + ", up to " + Percent(share) +
         " of their time: look whether it has more work, or a slower or busier machine.";
}

std::string SmallTensorsAdvice(const Metrics& all) {
  const auto groups = static_cast<double>(all.Count(Metric::kGroups));
  if (all.Count(Metric::kGroups) < kFewestCalls) return {};
  const double bytes = static_cast<double>(all.Count(Metric::kBytes)) / groups;
  const double tensors = static_cast<double>(all.Count(Metric::kTensors)) / groups;
  if (bytes >= kSmallGroup || tensors >= kFewTensors) return {};
  return "Operations are small, " + Bytes(bytes) +
         " each: give tensors together in one grouped call, or let fusion_delay gather more.";
}

std::string OverlapAdvice(const std::vector<Metrics>& ranks) {
  double worst = 1;
  double share = 0;
  for (const Metrics& metrics : ranks) {
    const double overlap = Overlap(metrics);
    if (overlap < 0) return {};
    worst = std::min(worst, overlap);
    share = std::max(share, WaitShare(metrics));
  }
  if (worst > 0.1 || share < kNoticeableWait) return {};
  return "Nothing overlaps with communication, which takes up to " + Percent(share) +
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
  const bool enough_steps = std::all_of(ranks.begin(), ranks.end(), [](const Metrics& metrics) {
    return metrics.Count(Metric::kSteps) >= kFewestSteps &&
           Seconds(metrics, Metric::kStepTime) >= kShortestRun;
  });
  if (enough_steps) {
    add(StragglerAdvice(ranks));
    // Whom one rank keeps waiting has nothing to overlap with.
    if (advice.empty()) add(OverlapAdvice(ranks));
  }
  add(SmallTensorsAdvice(Sum(ranks)));
  return advice;
}

std::string SummaryText(const std::vector<Metrics>& ranks) {
  std::string text =
      "rank    steps  step ms  waits  overlap     calls  tensors/group     given  "
      "negotiate us  move ms\n";
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const Metrics& of = ranks[rank];
    const auto steps = static_cast<double>(std::max<std::int64_t>(of.Count(Metric::kSteps), 1));
    const auto groups = static_cast<double>(std::max<std::int64_t>(of.Count(Metric::kGroups), 1));
    const double overlap = Overlap(of);
    char line[200];
    std::snprintf(line, sizeof line, "%4zu %8lld %8.3g %6s %8s %9lld %14.3g %9s %13.3g %8.3g\n",
                  rank, static_cast<long long>(of.Count(Metric::kSteps)),
                  1e3 * Seconds(of, Metric::kStepTime) / steps,
                  of.Count(Metric::kSteps) > 0 ? Percent(WaitShare(of)).c_str() : "-",
                  overlap < 0 ? "-" : Percent(overlap).c_str(),
                  static_cast<long long>(of.Count(Metric::kCalls)),
                  static_cast<double>(of.Count(Metric::kTensors)) / groups,
                  Bytes(static_cast<double>(of.Count(Metric::kBytes))).c_str(),
                  1e6 * PerCall(of, Metric::kNegotiationTime),
                  1e3 * Seconds(of, Metric::kMoveTime) / groups);
    text += line;
  }
  for (const std::string& advice : Advice(ranks)) text += advice + "\n";
  return text;
}

}  // namespace sirtaki::core::trace
