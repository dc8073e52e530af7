// A call trace tells the recorder and the metrics of a rank's calls.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "core/base/status.h"
#include "core/engine/work.h"
#include "core/trace/observer.h"

namespace sirtaki::core {

// Thread-safe. Does nothing without an observer.
class CallTrace {
 public:
  explicit CallTrace(trace::ObserverPtr observer) : observer_(std::move(observer)) {}

  void Submitted(const Work& work) const;
  void Joined(const Work& work) const;
  // All ranks have made the call, in batch `number`; or it is refused. Of this rank's work.
  void Agreed(const Work& work, std::uint64_t number, TimePoint now) const;
  // BeginCalls counts the calls that Submitted and Joined were told, from the time of the first;
  // EndCalls those that Agreed and Refused were told.
  void BeginCalls(std::int64_t calls, TimePoint first) const;
  void EndCalls(std::int64_t calls, TimePoint now) const;
  void Refused(const Work& work, const Status& why, std::uint64_t number, TimePoint now) const;
  void BeginWait(TimePoint now) const;
  // A thread began to wait at `begin`, and does so no longer.
  void Waited(const HandleState& handle, TimePoint begin, TimePoint end) const;
  void Left(std::string_view why, TimePoint now) const;
  void Stalled(std::string_view warning, TimePoint now) const;
  void Failed(const Status& cause, TimePoint now) const;

 private:
  void Tell(trace::EventKind kind, std::string_view text, TimePoint now) const;

  const trace::ObserverPtr observer_;
};

}  // namespace sirtaki::core
