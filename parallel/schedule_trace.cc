#include "parallel/schedule_trace.h"

#include <cctype>
#include <chrono>
#include <string_view>
#include <utility>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/engine/call_trace.h"
#include "parallel/schedule_text.h"

namespace sirtaki::parallel {

using core::Duration;
using core::TimePoint;
using core::trace::EventKind;

namespace {

// A look at what has arrived takes less: no bubble of the picture.
constexpr Duration kShortestBubble = std::chrono::microseconds(5);

constexpr std::string_view kOnRank = " on rank ";
constexpr std::string_view kWaits = "waits ";

}  // namespace

ScheduleTrace::ScheduleTrace(core::trace::ObserverPtr observer, Options options)
    : observer_(std::move(observer)), options_(std::move(options)) {}

ScheduleTrace::Batch::Batch(ScheduleTrace& trace, bool training)
    : trace_(trace),
      training_(training),
      told_(trace.observer_->doing, [&trace](TimePoint now) { return trace.Text(now); }) {
  ++trace.batches_;
  trace.busy_ = {};
  trace.batch_begin_ = trace.begin_ = trace.options_.now();
}

ScheduleTrace::Batch::~Batch() {
  const TimePoint end = trace_.options_.now();
  {
    core::MutexLock lock(trace_.mutex_);
    trace_.instruction_ = nullptr;
  }
  if (trace_.detail()) {
    if (complete_) trace_.Tell(EventKind::kBubble, "the end", trace_.begin_, end);
    trace_.Tell(EventKind::kBatch, trace_.options_.name, trace_.batch_begin_, end,
                trace_.options_.micro_batches);
  }
  if (!complete_ || !training_) return;
  // The first one learns shapes, and its memory is new.
  if (std::exchange(trace_.is_first_, false)) return;
  const Duration time = end - trace_.batch_begin_;
  trace_.all_time_ += time;
  trace_.all_busy_ += trace_.busy_;
  trace_.observer_->pipelines.Add(trace_.options_.name, time, trace_.busy_, trace_.options_.bubble);
}

void ScheduleTrace::Begin(const Instruction& instruction) {
  if (!instruction.is_message()) begin_ = arrived_ = options_.now();
  core::MutexLock lock(mutex_);
  instruction_ = &instruction;
  since_ = begin_;
}

void ScheduleTrace::Arrived() {
  arrived_ = options_.now();
  core::MutexLock lock(mutex_);
  since_ = arrived_;
}

void ScheduleTrace::End() {
  const Instruction* instruction = nullptr;
  {
    core::MutexLock lock(mutex_);
    instruction = std::exchange(instruction_, nullptr);
  }
  const bool reduces = instruction->kind == InstructionKind::kReduceTied;
  if (!instruction->computes() && !reduces) return;
  const TimePoint end = options_.now();
  if (!reduces) busy_ += end - arrived_;
  if (detail()) {
    const std::string text = parallel::Text(*instruction);
    Tell(EventKind::kBubble, text, begin_, arrived_);
    Tell(reduces ? EventKind::kReduce : EventKind::kPass, text, arrived_, end);
  }
  begin_ = end;
}

void ScheduleTrace::SetAwaited(const std::string* what) {
  const TimePoint now = what == nullptr ? TimePoint() : options_.now();
  core::MutexLock lock(mutex_);
  awaited_ = what;
  if (what != nullptr) since_ = now;
}

void ScheduleTrace::Stalled(const std::string& what, Duration waited) {
  core::Log(core::LogLevel::kWarning, "the pipeline " + core::Quoted(options_.name) + ": " + what +
                                          ", for " + core::DurationText(waited));
  // An event has little room, and says by itself which rank it is of; a peer's stays.
  std::string brief = what;
  if (const std::size_t own = brief.find(kOnRank); own < brief.find(kWaits)) {
    std::size_t end = own + kOnRank.size();
    while (end < brief.size() && std::isdigit(static_cast<unsigned char>(brief[end])) != 0) ++end;
    brief.erase(own, end - own);
  }
  core::CallTrace(observer_).Stalled(brief, options_.now());
}

std::string ScheduleTrace::Activity() const {
  core::MutexLock lock(mutex_);
  return instruction_ == nullptr ? std::string() : Describe(*instruction_);
}

std::string ScheduleTrace::Text(TimePoint now) const {
  core::MutexLock lock(mutex_);
  if (instruction_ == nullptr && awaited_ == nullptr) return {};
  return "in the pipeline " + core::Quoted(options_.name) + ": " +
         (awaited_ != nullptr ? *awaited_ : Describe(*instruction_)) + ", for " +
         core::DurationText(now - since_);
}

double ScheduleTrace::WaitedShare() const {
  if (all_time_ <= Duration::zero()) return 0;
  return 1 - std::chrono::duration<double>(all_busy_) / std::chrono::duration<double>(all_time_);
}

void ScheduleTrace::Tell(EventKind kind, const std::string& text, TimePoint begin, TimePoint end,
                         int count) {
  if (kind == EventKind::kBubble && end - begin < kShortestBubble) return;
  core::trace::Event event;
  event.kind = kind;
  event.track = core::trace::Track::kPipeline;
  event.thread = core::trace::ThisThreadNumber();
  event.count = static_cast<std::uint32_t>(count);
  event.number = batches_;
  event.begin = begin;
  event.end = end;
  event.SetText(text);
  observer_->recorder.Add(event);
}

}  // namespace sirtaki::parallel
