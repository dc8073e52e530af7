// A trace records of one group in its lane that it waited for its turn, began, and was finished;
// how long it was packed, moved and unpacked, and when, if detail is wanted.
#pragma once

#include <string_view>

#include "core/base/types.h"
#include "core/trace/observer.h"

namespace sirtaki::ops {

struct GroupTask;

// GroupTrace is not thread-safe. It does nothing without an observer.
class GroupTrace {
 public:
  // The trace begins when the group's turn has come.
  GroupTrace(core::trace::ObserverPtr observer, const GroupTask& task, core::trace::Track track);
  ~GroupTrace();
  GroupTrace(GroupTrace&&) = default;
  GroupTrace& operator=(GroupTrace&&) = delete;

  // The group is packed from now on, moved by the backend of that name, or unpacked; or none of
  // them.
  void Pack() { Enter(core::trace::EventKind::kPack, {}); }
  void Move(std::string_view backend) { Enter(core::trace::EventKind::kMove, backend); }
  void Unpack() { Enter(core::trace::EventKind::kUnpack, {}); }
  // A part of moving that this rank does by itself.
  void Reduce() { Move("kernels"); }
  void Pause() { Enter(kNothing, {}); }
  // The lane has waited for what makes the group's inputs.
  void Awaited(core::TimePoint begin, core::TimePoint end);
  // It was moved by a device, since `begin`.
  void Moved(std::string_view backend, core::TimePoint begin, core::TimePoint end);

  // It went well. `begin`: if that was later than its turn.
  void Finish(core::TimePoint begin = {});

  bool on() const { return observer_ != nullptr; }
  core::TimePoint begin() const { return begin_; }

 private:
  using EventKind = core::trace::EventKind;
  static constexpr EventKind kNothing = EventKind::kFinish;  // as a phase

  void EndTransfer(core::TimePoint now);
  void Enter(EventKind phase, std::string_view backend);
  void EndPhase(core::TimePoint now);
  void Add(EventKind kind, core::TimePoint begin, core::TimePoint end);
  void AddDetail(EventKind kind, std::string_view text, core::TimePoint begin, core::TimePoint end);

  core::trace::ObserverPtr observer_;  // null as well in what was moved from
  bool counts_ = true;                 // false: only its events are kept
  bool transfers_ = false;             // data on the host, as the clock of communication has it
  core::trace::Event event_;           // the last one; all have its text, but for details
  core::OpKind kind_ = core::OpKind::kAllReduce;
  core::TimePoint begin_{};
  EventKind phase_ = kNothing;
  core::TimePoint phase_begin_{};
  std::string_view backend_;
};

}  // namespace sirtaki::ops
