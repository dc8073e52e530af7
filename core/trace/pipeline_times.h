// How long the batches of pipelines took on a rank, and for how much of that it computed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"

namespace sirtaki::core::trace {

// The times of the training batches of the pipelines of one name, except the first batch of each.
// Ranks send it to each other as it is.
struct PipelineTimes {
  static constexpr std::size_t kNameBytes = 64;

  std::array<char, kNameBytes> letters{};
  std::int64_t batches = 0;
  std::int64_t nanoseconds = 0;       // from the begin of a batch to its end
  std::int64_t busy_nanoseconds = 0;  // of these, in passes that have what they need
  double scheduled_nanoseconds = 0;   // of these, in bubbles of the schedule

  std::string name() const;
};
static_assert(std::is_trivially_copyable_v<PipelineTimes>);

// Thread-safe.
class PipelineTotals {
 public:
  // A batch took `time`, and `busy` of it was computed. `bubble`: the share of the time that its
  // schedule lets ranks wait.
  void Add(std::string_view name, Duration time, Duration busy, double bubble)
      SIRTAKI_EXCLUDES(mutex_);
  std::vector<PipelineTimes> Read() const SIRTAKI_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  std::vector<PipelineTimes> all_ SIRTAKI_GUARDED_BY(mutex_);  // of each name, a few
};

// A line for each pipeline, with what its ranks waited and what its schedule says. `ranks`: what
// each rank has. Pure.
std::string PipelinesText(const std::vector<std::vector<PipelineTimes>>& ranks);

}  // namespace sirtaki::core::trace
