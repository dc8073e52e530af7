#include "ops/groups/group_trace.h"

#include <algorithm>
#include <utility>

#include "ops/groups/group_task.h"

namespace sirtaki::ops {

using core::trace::Metric;

GroupTrace::GroupTrace(core::trace::ObserverPtr observer, const GroupTask& task,
                       core::trace::Track track)
    : observer_(std::move(observer)), counts_(!task.of_device) {
  if (observer_ == nullptr) return;
  event_.track = track;
  if (track == core::trace::Track::kDevice) event_.thread = task.signature().slot;
  event_.set = task.channel.set;
  event_.number = task.number;
  event_.count = static_cast<std::uint32_t>(task.items.size());
  event_.bytes = task.InputBytes();
  kind_ = task.signature().kind;
  event_.SetText(task.ToString());
  begin_ = core::Clock::now();
  const core::TimePoint since = std::min(task.since, begin_);
  if (counts_) observer_->metrics.Add(Metric::kQueueTime, begin_ - since);
  transfers_ = counts_ && track != core::trace::Track::kDevice;
  if (transfers_) observer_->metrics.communication().BeginTransfer(begin_);
  Add(EventKind::kQueue, since, begin_);
  Add(EventKind::kBegin, begin_, begin_);
}

GroupTrace::~GroupTrace() {
  if (observer_ != nullptr && transfers_) EndTransfer(core::Clock::now());
}

void GroupTrace::EndTransfer(core::TimePoint now) {
  if (std::exchange(transfers_, false)) observer_->metrics.communication().EndTransfer(now);
}

void GroupTrace::Enter(EventKind phase, std::string_view backend) {
  if (observer_ == nullptr) return;
  const core::TimePoint now = core::Clock::now();
  EndPhase(now);
  phase_ = phase;
  phase_begin_ = now;
  backend_ = backend;
}

void GroupTrace::EndPhase(core::TimePoint now) {
  if (phase_ == kNothing) return;
  const Metric metric = phase_ == EventKind::kPack   ? Metric::kPackTime
                        : phase_ == EventKind::kMove ? Metric::kMoveTime
                                                     : Metric::kUnpackTime;
  if (counts_) observer_->metrics.Add(metric, now - phase_begin_);
  if (observer_->detail.load(std::memory_order_relaxed)) {
    AddDetail(phase_, backend_, phase_begin_, now);
  }
  phase_ = kNothing;
}

void GroupTrace::Awaited(core::TimePoint begin, core::TimePoint end) {
  if (observer_ == nullptr || !observer_->detail.load(std::memory_order_relaxed)) return;
  AddDetail(EventKind::kWait, {}, begin, end);
}

void GroupTrace::Moved(std::string_view backend, core::TimePoint begin, core::TimePoint end) {
  if (observer_ == nullptr) return;
  phase_ = EventKind::kMove;
  phase_begin_ = begin;
  backend_ = backend;
  EndPhase(end);
}

void GroupTrace::Finish(core::TimePoint begin) {
  if (observer_ == nullptr) return;
  const core::TimePoint now = core::Clock::now();
  EndPhase(now);
  EndTransfer(now);
  Add(EventKind::kFinish, std::max(begin, begin_), now);
  if (!counts_) return;
  observer_->metrics.AddGroup(kind_, event_.count, event_.bytes);
  if (event_.track == core::trace::Track::kDevice) observer_->metrics.Add(Metric::kDeviceGroups);
}

void GroupTrace::Add(EventKind kind, core::TimePoint begin, core::TimePoint end) {
  event_.kind = kind;
  event_.begin = begin;
  event_.end = end;
  observer_->recorder.Add(event_);
}

void GroupTrace::AddDetail(EventKind kind, std::string_view text, core::TimePoint begin,
                           core::TimePoint end) {
  core::trace::Event event = event_;
  event.kind = kind;
  event.begin = begin;
  event.end = end;
  event.SetText(text);
  observer_->recorder.Add(event);
}

}  // namespace sirtaki::ops
