#include "frameworks/torch/gradients/step_tuner.h"

#include <ATen/ops/zeros.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <iomanip>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/config/config_table.h"
#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/tensors/throw.h"
#include "session/session_observability.h"

namespace sirtaki::detail {
namespace {

using Limits = session::Session::Limits;

struct Tunable {
  std::string_view option;
  std::int64_t Limits::*limit;
  std::int64_t first;  // of the values that are tried: each twice the one before
  std::int64_t last;
};
constexpr std::array<Tunable, 4> kTunables = {{
    {"bucket_bytes", &Limits::bucket_bytes, std::int64_t{1} << 20, std::int64_t{128} << 20},
    {"chunk_bytes", &Limits::chunk_bytes, std::int64_t{64} << 10, std::int64_t{8} << 20},
    {"small_bytes", &Limits::small_bytes, std::int64_t{4} << 10, std::int64_t{1} << 20},
    {"fusion_delay", &Limits::fusion_delay_us, 25, 800},
}};

const core::OptionSpec& SpecOf(const Tunable& tunable) { return *core::FindOption(tunable.option); }

// Says whether gradients are moved in pieces of chunk_bytes: where they are reduced in shared memory
// they are not. That is within a host whose ranks have a pool.
bool MovesInChunks(const session::Session& session) {
  return session.topology().local_size < session.topology().size || !session.HasPool();
}

// Around the value that is set. One that was set to nothing was meant so.
std::vector<fusion::TunedOption> OptionsFrom(const Limits& limits, bool moves_in_chunks) {
  std::vector<fusion::TunedOption> options;
  for (const Tunable& tunable : kTunables) {
    const std::int64_t now = limits.*tunable.limit;
    fusion::TunedOption option;
    option.name = tunable.option;
    const bool matters = tunable.option != "chunk_bytes" || moves_in_chunks;
    if (now > 0 && matters) {
      for (std::int64_t value = tunable.first; value <= tunable.last; value *= 2) {
        option.values.push_back(value);
      }
    }
    const auto place = std::lower_bound(option.values.begin(), option.values.end(), now);
    option.start = static_cast<std::size_t>(place - option.values.begin());
    if (place == option.values.end() || *place != now) option.values.insert(place, now);
    options.push_back(std::move(option));
  }
  return options;
}

// Returns the limits that were found, as a file of the option settings.
std::string Settings(const Limits& limits) {
  std::string text = "# Found by the autotuner.\n";
  for (const Tunable& tunable : kTunables) {
    const core::OptionSpec& option = SpecOf(tunable);
    text.append(option.name).append(": ");
    text += core::FormatOptionValue(option, limits.*tunable.limit) + "\n";
  }
  return text;
}

void Write(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) {
    core::Log(core::LogLevel::kWarning, "autotune: cannot write to " + core::Quoted(path));
  }
}

}  // namespace

StepTuner::StepTuner(const SessionSet& world)
    : world_(world), configured_(world.session->session().limits()) {
  world_.session->session().observation().SetLastWords([this] { SayIfEarly(); });
}

Limits StepTuner::LimitsNow() const {
  Limits limits = configured_;
  const std::vector<std::int64_t> values = tuner_->values();
  for (std::size_t i = 0; i < kTunables.size(); ++i) limits.*kTunables[i].limit = values[i];
  return limits;
}

void StepTuner::Apply() {
  const Limits limits = LimitsNow();
  if (limits == world_.session->session().limits()) return;
  ThrowIfError(world_.session->session().SetLimits(limits));
}

void StepTuner::AfterStep() {
  if (finished_) return;
  ++steps_;
  const core::TimePoint now = core::Clock::now();
  const std::optional<core::TimePoint> before = std::exchange(last_step_, now);
  // How many ranks are here, how many know how long the step has taken, how long that was, and how
  // many move gradients in chunks.
  const at::Tensor told = at::zeros({4}, at::kDouble);
  auto* const numbers = told.mutable_data_ptr<double>();
  numbers[0] = 1;
  if (before) {
    numbers[1] = 1;
    numbers[2] = std::chrono::duration<double>(now - *before).count();
  }
  numbers[3] = MovesInChunks(world_.session->session()) ? 1 : 0;
  TensorCall call =
      OwnCall(core::OpKind::kAllReduce, told, "#the time of a step, for autotune", world_);
  call.derived_name = true;
  call.in_place = true;
  PendingTensor::Start(std::move(call), world_.session)->Synchronize();
  // A rank that has joined would not know what the others make of it.
  const int size = world_.size();
  if (static_cast<int>(numbers[0]) < size || static_cast<int>(numbers[1]) < size) return;
  if (!tuner_) tuner_.emplace(OptionsFrom(configured_, numbers[3] > 0), fusion::AutotunerOptions());
  tuner_->AddStep(numbers[2] / size);
  finished_ = tuner_->finished();
  Apply();
  if (finished_) Finish();
  last_step_ = core::Clock::now();
}

// A program's own optimizer may live for longer than its session: until the process exits, in
// Python.
StepTuner::~StepTuner() { world_.session->session().observation().SayLastWords(); }

void StepTuner::SayIfEarly() const {
  if (finished_ || world_.rank() != world_.first()) return;
  const std::size_t trials = tuner_ ? tuner_->trials().size() : 0;
  core::LogAnswer(
      "autotune ended early, after " + std::to_string(steps_) +
      (steps_ == 1 ? " step, " : " steps, ") + std::to_string(trials) +
      (trials == 1 ? " trial" : " trials") +
      ": the optimizer whose steps it measures, the first of the job, made its last step before "
      "the search was over. Train for more steps, " +
      std::to_string(1 + fusion::AutotunerOptions().most_steps()) + " at most");
}

// `step 0.44 -> 0.38 ms`
std::string StepTuner::GainText() const {
  std::ostringstream text;
  text << std::setprecision(3) << "step " << tuner_->first_seconds() * 1e3;
  const bool gained = LimitsNow() != configured_;
  if (gained) text << " -> " << tuner_->standing_seconds() * 1e3;
  text << " ms; " << (gained ? "used from now on:" : "nothing tried was better than what was set:");
  return text.str();
}

void StepTuner::Finish() {
  if (world_.rank() != world_.first()) return;
  const std::string settings = Settings(LimitsNow());
  std::string flags;
  for (const Tunable& tunable : kTunables) {
    const core::OptionSpec& option = SpecOf(tunable);
    flags +=
        " " + option.Flag() + "=" + core::FormatOptionValue(option, LimitsNow().*tunable.limit);
  }
  core::LogAnswer("autotune: " + GainText() + flags + " (after " +
                  std::to_string(tuner_->trials().size()) + " trials)");
  const std::string& log = world_.session->session().config().autotune_log;
  if (log.empty()) return;
  Write(log, tuner_->Csv());
  Write(log + ".settings", settings);
}

}  // namespace sirtaki::detail
