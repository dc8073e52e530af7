// The calls that a rank has made, as its flight record tells of them: whether it has made one in
// which another rank waits. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/trace/flight_record.h"

namespace sirtaki::launch {

// The files that explain records speak of these.
using core::Duration;
using core::RankRanges;
using core::TimePoint;
using core::trace::Event;
using core::trace::EventKind;
using core::trace::FlightRecord;

// Up to when a record tells what the rank waited for and ran, by its own clock: its group's fault,
// or when it was written.
TimePoint EndOf(const FlightRecord& record);
// The end by the clock of rank 0, by which those of all ranks of a job can be compared.
TimePoint CommonEndOf(const FlightRecord& record);

class Calls {
 public:
  enum class Answer : std::uint8_t { kMade, kNotMade, kUnknown };

  // `record` must outlive it.
  explicit Calls(const FlightRecord& record);

  // Whether this rank has made the call in which `other` waits. Names are used again and again, and
  // some ranks may be steps ahead, or make their calls in another order: what both know alike are
  // the batches that the ranks have agreed on. Whoever has used the key as often as the other since
  // one that both have seen has made the call.
  Answer HasMade(const FlightRecord::Pending& call, const Calls& other) const;

 private:
  struct Use {
    TimePoint since{};
    std::uint64_t number = 0;            // it was the n-th call of the set
    std::optional<std::uint64_t> batch;  // of the agreement; none: it was still to come
  };
  struct Set {
    std::map<std::string, std::vector<Use>, std::less<>> uses;  // by key, in order
    std::optional<std::uint64_t> first_batch;                   // that is in the record
    std::optional<std::uint64_t> last_batch;
  };

  static std::uint64_t CountAfter(const Set& set, std::string_view key,
                                  std::optional<std::uint64_t> batch);
  const Set& Find(std::uint32_t set) const;
  Answer ByNumber(const FlightRecord::Pending& call) const;

  const FlightRecord& record_;
  std::map<std::uint32_t, Set> sets_;
};

}  // namespace sirtaki::launch
