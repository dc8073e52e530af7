#include "core/trace/pipeline_times.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>

#include "core/base/text.h"

namespace sirtaki::core::trace {
namespace {

std::int64_t NanosecondsOf(Duration time) {
  return std::max<std::int64_t>(std::chrono::nanoseconds(time).count(), 0);
}

std::string SharePercent(double share) {
  char text[16];
  std::snprintf(text, sizeof text, "%.1f %%", 100 * share);
  return text;
}

// What all ranks together have of a pipeline.
struct OfRanks {
  std::int64_t batches = 0;
  std::int64_t longest = 0;  // the time of the rank that has the most: the others are done earlier
  double busy = 0;
  double scheduled = 0;  // the share
  std::vector<std::pair<int, std::int64_t>> busy_of;
};

}  // namespace

std::string PipelineTimes::name() const {
  return {letters.data(), strnlen(letters.data(), kNameBytes)};
}

void PipelineTotals::Add(std::string_view name, Duration time, Duration busy, double bubble) {
  name = name.substr(0, PipelineTimes::kNameBytes);
  MutexLock lock(mutex_);
  auto times = std::find_if(all_.begin(), all_.end(),
                            [name](const PipelineTimes& of) { return of.name() == name; });
  if (times == all_.end()) {
    times = all_.insert(times, PipelineTimes());
    std::copy(name.begin(), name.end(), times->letters.begin());
  }
  ++times->batches;
  times->nanoseconds += NanosecondsOf(time);
  times->busy_nanoseconds += NanosecondsOf(busy);
  times->scheduled_nanoseconds += bubble * static_cast<double>(NanosecondsOf(time));
}

std::vector<PipelineTimes> PipelineTotals::Read() const {
  MutexLock lock(mutex_);
  return all_;
}

std::string PipelinesText(const std::vector<std::vector<PipelineTimes>>& ranks) {
  std::map<std::string, OfRanks> pipelines;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const PipelineTimes& times : ranks[rank]) {
      if (times.nanoseconds <= 0) continue;
      OfRanks& of = pipelines[times.name()];
      of.batches = std::max(of.batches, times.batches);
      of.longest = std::max(of.longest, times.nanoseconds);
      of.busy += static_cast<double>(times.busy_nanoseconds);
      of.scheduled += times.scheduled_nanoseconds / static_cast<double>(times.nanoseconds);
      of.busy_of.emplace_back(static_cast<int>(rank), times.busy_nanoseconds);
    }
  }
  std::string text;
  for (const auto& [name, of] : pipelines) {
    const auto count = static_cast<double>(of.busy_of.size());
    const auto longest = static_cast<double>(of.longest);
    const auto waits = [&](std::int64_t busy) {
      return SharePercent(1 - static_cast<double>(busy) / longest);
    };
    text += "The pipeline " + Quoted(name) + ", " + std::to_string(of.batches) +
            (of.batches == 1 ? " batch" : " batches") + ": its ranks wait " +
            SharePercent(1 - of.busy / count / longest) + " of the time, and " +
            SharePercent(of.scheduled / count) + " by its schedule with passes of equal times";
    if (of.busy_of.size() > 1) {
      const auto [most, least] =
          std::minmax_element(of.busy_of.begin(), of.busy_of.end(),
                              [](const auto& a, const auto& b) { return a.second < b.second; });
      text += "; rank " + std::to_string(most->first) + " waits " + waits(most->second) +
              ", rank " + std::to_string(least->first) + " " + waits(least->second);
    }
    text += ".\n";
  }
  return text;
}

}  // namespace sirtaki::core::trace
