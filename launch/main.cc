// sirtakirun: starts a program on several ranks. See docs/launching.md.
#include <unistd.h>

#include <array>
#include <climits>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "core/config_table.h"
#include "core/cores.h"
#include "core/environment.h"
#include "launch/find_launcher.h"
#include "launch/job.h"
#include "launch/options.h"
#include "launch/plan.h"
#include "launch/rank_process.h"
#include "launch/sockets.h"
#include "launch/words.h"

namespace sirtaki::launch {
namespace {

constexpr int kWrongUse = 2;

int Complain(const core::Status& status) {
  std::fprintf(stderr, "sirtakirun: %s\n", status.message().c_str());
  return kWrongUse;
}

ThisMachine FindThisMachine() {
  const std::array<core::CpuShare, 1> own = {core::CpusOfThisProcess()};
  return {HostName(), core::SharedCores(own)};
}

// As the other hosts have it too.
std::string OwnPath(const char* called) {
  std::array<char, PATH_MAX> path{};
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size() - 1);
  return length > 0 ? std::string(path.data(), static_cast<std::size_t>(length)) : called;
}

core::Status FindStartTimeout(const LaunchOptions& options, const core::EnvironmentView& env,
                              core::Duration* out) {
  const core::OptionSpec& spec = *core::FindOption("start_timeout");
  core::Config config;
  const auto given = options.knobs.find(spec.Variable());
  const auto text = given != options.knobs.end() ? given->second : env.Find(spec.Variable());
  if (text && !core::SetOptionFromText(spec, *text, &config)) {
    return {core::StatusCode::kInvalidArgument,
            spec.Variable() + "=" + *text + ": allowed is " + core::AllowedValues(spec)};
  }
  *out = config.start_timeout;
  return core::Status::Ok();
}

// Carries the plan out, as often as it takes and is allowed.
int RunAll(PlanInput input, core::Duration start_timeout) {
  for (int code = kWrongUse;; ++input.restarts) {
    Plan plan;
    const core::Status status = MakePlan(input, &plan);
    if (!status.ok()) {
      Complain(status);
      return code;
    }
    if (input.options.verbose) std::fputs(PlanText(plan).c_str(), stderr);
    const JobResult result =
        RunJob(plan, input.options, input.restarts > 0, input.environment, start_timeout);
    code = result.code;
    if (code == 0 || !result.may_help || input.restarts == input.options.max_restarts) {
      return code;
    }
    input.gone.insert(input.gone.end(), result.gone.begin(), result.gone.end());
    std::fprintf(stderr, "sirtakirun: starting again, %d of %d%s%s\n", input.restarts + 1,
                 input.options.max_restarts, input.gone.empty() ? "" : ", without ",
                 Joined(input.gone, ", ").c_str());
  }
}

int Main(const std::vector<std::string>& args, const char* called) {
  if (args.size() > 2 && args[0] == kRankFlag && args[1] == "--") {
    return RunAsRank({args.begin() + 2, args.end()});
  }
  PlanInput input;
  input.read = &core::ReadFile;
  core::Status status = ParseOptions(args, input.read, &input.options);
  if (!status.ok()) return Complain(status);
  if (input.options.help) return std::fputs(HelpText().c_str(), stdout) < 0 ? 1 : 0;
  if (input.options.version) return std::puts("sirtakirun " SIRTAKI_VERSION) < 0 ? 1 : 0;

  input.environment = core::EnvironmentView::OfProcess();
  input.machine = FindThisMachine();
  input.is_root = geteuid() == 0;
  input.self = OwnPath(called);
  core::Duration start_timeout{};
  status = FindStartTimeout(input.options, input.environment, &start_timeout);
  if (status.ok())
    status = FindLauncher(input.options.launcher, input.environment, &input.launcher);
  if (!status.ok()) return Complain(status);

  for (const std::string& note : input.options.notes) {
    std::fprintf(stderr, "sirtakirun: %s\n", note.c_str());
  }
  if (!input.options.dry_run) return RunAll(std::move(input), start_timeout);
  Plan plan;
  status = MakePlan(input, &plan);
  if (!status.ok()) return Complain(status);
  return std::fputs(PlanText(plan).c_str(), stdout) < 0 ? 1 : 0;
}

}  // namespace
}  // namespace sirtaki::launch

int main(int argc, char** argv) { return sirtaki::launch::Main({argv + 1, argv + argc}, argv[0]); }
