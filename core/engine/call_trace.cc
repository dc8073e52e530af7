#include "core/engine/call_trace.h"

#include <algorithm>

namespace sirtaki::core {
namespace {

using trace::Event;
using trace::EventKind;
using trace::Metric;

// SetText is what Key::ToString has, most often without its allocations.
void SetText(const Key& key, Event* event) {
  const std::string_view name = key.name.text();
  if (!key.name.plain() || key.set != kWorldSet || name.size() + 2 > Event::kTextBytes) {
    return event->SetText(key.ToString());
  }
  event->letters[0] = '"';
  std::copy(name.begin(), name.end(), event->letters.begin() + 1);
  event->letters[name.size() + 1] = '"';
  event->text_bytes = static_cast<std::uint8_t>(name.size() + 2);
}

Event OfCall(EventKind kind, const Work& work, TimePoint begin, TimePoint end) {
  Event event;
  event.kind = kind;
  event.track = trace::Track::kNegotiation;
  event.set = work.request.key.set;
  event.begin = begin;
  event.end = end;
  return event;
}

}  // namespace

void CallTrace::Submitted(const Work& work) const {
  if (observer_ == nullptr) return;
  Event event = OfCall(EventKind::kSubmit, work, work.submitted, work.submitted);
  SetText(work.request.key, &event);
  event.number = work.number;
  event.bytes = work.InputBytes();
  event.alone = work.is_message() ? 1 : 0;
  observer_->recorder.Add(event);
  observer_->metrics.Add(Metric::kCalls);
  if (work.is_message()) observer_->metrics.Add(Metric::kMessages);
}

void CallTrace::Joined(const Work& work) const {
  if (observer_ == nullptr) return;
  Event event = OfCall(EventKind::kJoin, work, work.submitted, work.submitted);
  event.number = work.number;
  observer_->recorder.Add(event);
  observer_->metrics.Add(Metric::kCalls);
}

void CallTrace::BeginCalls(std::int64_t calls, TimePoint first) const {
  if (observer_ != nullptr && calls > 0) {
    observer_->metrics.communication().BeginCalls(calls, first);
  }
}

void CallTrace::EndCalls(std::int64_t calls, TimePoint now) const {
  if (observer_ != nullptr && calls > 0) observer_->metrics.communication().EndCalls(calls, now);
}

void CallTrace::Agreed(const Work& work, std::uint64_t number, TimePoint now) const {
  if (observer_ == nullptr) return;
  // The call may be of the same round: then its time is later than the round's.
  Event event = OfCall(EventKind::kNegotiate, work, work.submitted, std::max(now, work.submitted));
  SetText(work.request.key, &event);
  event.number = number;
  observer_->recorder.Add(event);
  observer_->metrics.Add(Metric::kNegotiationTime, now - work.submitted);
}

void CallTrace::Refused(const Work& work, const Status& why, std::uint64_t number,
                        TimePoint now) const {
  if (observer_ == nullptr) return;
  Agreed(work, number, now);  // on that
  Event event = OfCall(EventKind::kRefuse, work, now, now);
  event.SetText(why.message());
  observer_->recorder.Add(event);
  observer_->metrics.Add(Metric::kRefused);
}

void CallTrace::BeginWait(TimePoint now) const {
  if (observer_ != nullptr) observer_->metrics.communication().BeginWait(now);
}

void CallTrace::Waited(const HandleState& handle, TimePoint begin, TimePoint end) const {
  if (observer_ == nullptr) return;
  Event event;
  event.kind = EventKind::kWaitFor;
  event.thread = trace::ThisThreadNumber();
  event.set = handle.key().set;
  event.begin = begin;
  event.end = end;
  if (handle.key().form != Key::Form::kUnnamed) {
    SetText(handle.key(), &event);
  } else {
    event.SetText("a call without a name");  // its number was given after the handle was made
  }
  observer_->recorder.Add(event);
  observer_->metrics.communication().EndWait(end);
}

void CallTrace::Left(std::string_view why, TimePoint now) const {
  Tell(EventKind::kLeave, why, now);
}

void CallTrace::Stalled(std::string_view warning, TimePoint now) const {
  Tell(EventKind::kStall, warning, now);
  if (observer_ != nullptr) observer_->metrics.Add(Metric::kStalls);
}

void CallTrace::Failed(const Status& cause, TimePoint now) const {
  Tell(EventKind::kFault, cause.ToString(), now);
}

void CallTrace::Tell(EventKind kind, std::string_view text, TimePoint now) const {
  if (observer_ == nullptr) return;
  Event event;
  event.kind = kind;
  event.track = trace::Track::kNegotiation;
  event.begin = now;
  event.end = now;
  event.SetText(text);
  observer_->recorder.Add(event);
}

}  // namespace sirtaki::core
