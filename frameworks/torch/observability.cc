#include "sirtaki/observability.h"

#include <exception>
#include <stdexcept>
#include <utility>

#include "core/trace/metrics.h"
#include "frameworks/observation.h"
#include "frameworks/torch/session_state.h"
#include "frameworks/torch/throw.h"

namespace sirtaki {
namespace {

using core::trace::Metric;

frameworks::Observation& Of(detail::SessionState& state) {
  if (state.gone()) detail::ThrowIfError(state.Check());
  return state.session().observation();
}

void MarkSpan(const std::string& text, const Session& session, core::TimePoint begin,
              core::TimePoint end) noexcept {
  try {
    const auto state = detail::StateOf(session);
    if (!state->gone()) state->session().observation().Mark(text, begin, end);
  } catch (const std::exception&) {  // there is no session: nobody wants to know
    return;
  }
}

}  // namespace

Metrics metrics(const Session& session) {
  const auto state = detail::StateOf(session);
  const core::trace::Metrics now = Of(*state).observer()->metrics.Read();
  const auto seconds = [&now](Metric id) {
    return std::chrono::duration<double>(now.Time(id)).count();
  };
  Metrics metrics;
  metrics.steps = now.Count(Metric::kSteps);
  metrics.step_seconds = seconds(Metric::kStepTime);
  metrics.backward_seconds = seconds(Metric::kBackwardTime);
  metrics.wait_seconds = seconds(Metric::kWaitTime);
  metrics.calls = now.Count(Metric::kCalls);
  metrics.refused_calls = now.Count(Metric::kRefused);
  metrics.groups = now.Count(Metric::kGroups);
  metrics.tensors = now.Count(Metric::kTensors);
  metrics.bytes = now.Count(Metric::kBytes);
  metrics.negotiation_seconds = seconds(Metric::kNegotiationTime);
  metrics.queue_seconds = seconds(Metric::kQueueTime);
  metrics.pack_seconds = seconds(Metric::kPackTime);
  metrics.move_seconds = seconds(Metric::kMoveTime);
  metrics.unpack_seconds = seconds(Metric::kUnpackTime);
  metrics.stall_warnings = now.Count(Metric::kStalls);
  return metrics;
}

void start_timeline(const std::string& path, const Session& session) {
  const auto state = detail::StateOf(session);
  frameworks::Observation& observation = Of(*state);
  if (path.empty()) {
    detail::ThrowStatus(
        core::Status(core::StatusCode::kInvalidArgument, "start_timeline(): the path is empty"));
  }
  const core::Status status = observation.StartTimeline(path);
  if (status.code() == core::StatusCode::kBackend) throw std::runtime_error(status.message());
  detail::ThrowIfError(status);
}

void stop_timeline(const Session& session) {
  const auto state = detail::StateOf(session);
  Of(*state).StopTimeline();
}

void mark(const std::string& text, const Session& session) noexcept {
  const core::TimePoint now = core::Clock::now();
  MarkSpan(text, session, now, now);
}

MarkedSpan::MarkedSpan(std::string text, Session session)
    : text_(std::move(text)), session_(std::move(session)), begin_(core::Clock::now()) {}

MarkedSpan::~MarkedSpan() { MarkSpan(text_, session_, begin_, core::Clock::now()); }

}  // namespace sirtaki
