#include "sirtaki/observability.h"

#include <exception>
#include <stdexcept>
#include <utility>

#include "core/trace/metrics.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/tensors/throw.h"
#include "session/session_observability.h"

namespace sirtaki {
namespace {

using core::trace::Metric;

MetricValues ValuesOf(const core::trace::Metrics& of) {
  const auto seconds = [&of](Metric id) {
    return std::chrono::duration<double>(of.Time(id)).count();
  };
  MetricValues values;
  values.steps = of.Count(Metric::kSteps);
  values.timed_steps = of.Count(Metric::kTimedSteps);
  values.step_seconds = seconds(Metric::kStepTime);
  values.backward_seconds = seconds(Metric::kBackwardTime);
  values.session_seconds = seconds(Metric::kSessionTime);
  values.wait_seconds = seconds(Metric::kWaitTime);
  values.transfer_seconds = seconds(Metric::kTransferTime);
  values.exposed_seconds = seconds(Metric::kExposedTime);
  values.agreement_seconds = seconds(Metric::kAgreementTime);
  values.calls = of.Count(Metric::kCalls);
  values.messages = of.Count(Metric::kMessages);
  values.refused_calls = of.Count(Metric::kRefused);
  values.groups = of.Count(Metric::kGroups);
  values.device_groups = of.Count(Metric::kDeviceGroups);
  values.tensors = of.Count(Metric::kTensors);
  values.bytes = of.Count(Metric::kBytes);
  values.negotiation_seconds = seconds(Metric::kNegotiationTime);
  values.queue_seconds = seconds(Metric::kQueueTime);
  values.pack_seconds = seconds(Metric::kPackTime);
  values.move_seconds = seconds(Metric::kMoveTime);
  values.unpack_seconds = seconds(Metric::kUnpackTime);
  values.stall_warnings = of.Count(Metric::kStalls);
  values.overlap = core::trace::Overlap(of);
  values.fusion_efficiency = core::trace::FusionEfficiency(of);
  return values;
}

void MarkSpan(const std::string& text, const std::shared_ptr<detail::SessionState>& given,
              core::TimePoint begin, core::TimePoint end) noexcept {
  try {
    const auto state = detail::StateOf(given);
    if (!state->gone()) state->session().observation().Mark(text, begin, end);
  } catch (const std::exception&) {  // there is no session: nobody wants to know
    return;
  }
}

}  // namespace

Metrics metrics() {
  const auto state = detail::AliveSession();
  session::SessionObservability& observation = state->session().observation();
  return {ValuesOf(observation.observer()->metrics.Read()),
          ValuesOf(observation.steps().LastStep())};
}

void start_timeline(const std::string& path) {
  const auto state = detail::AliveSession();
  if (path.empty()) {
    detail::ThrowInvalid("start_timeline(): the path is empty");
  }
  const core::Status status = state->session().observation().StartTimeline(path);
  if (status.code() == core::StatusCode::kBackend) throw std::runtime_error(status.message());
  detail::ThrowIfError(status);
}

void stop_timeline() { detail::AliveSession()->session().observation().StopTimeline(); }

void mark(const std::string& text) noexcept {
  const core::TimePoint now = core::Clock::now();
  MarkSpan(text, detail::SessionScope::Given(), now, now);
}

MarkedSpan::MarkedSpan(std::string text)
    : text_(std::move(text)), given_(detail::SessionScope::Given()), begin_(core::Clock::now()) {}

MarkedSpan::~MarkedSpan() { MarkSpan(text_, given_, begin_, core::Clock::now()); }

}  // namespace sirtaki
