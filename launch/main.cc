// sirtakirun: starts a program on several ranks. See docs/launching.md.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/environment.h"
#include "core/base/text.h"
#include "core/config/config_table.h"
#include "core/machine/cores.h"
#include "launch/base/build_facts.h"
#include "launch/base/child.h"
#include "launch/base/numbered_files.h"
#include "launch/base/shell_text.h"
#include "launch/checks/check_build.h"
#include "launch/checks/check_hosts.h"
#include "launch/checks/host_report.h"
#include "launch/elastic/elastic_job.h"
#include "launch/elastic/elastic_options.h"
#include "launch/elastic/history.h"
#include "launch/hosts/allocation.h"
#include "launch/job/failure_judgement.h"
#include "launch/job/job.h"
#include "launch/job/own_launcher.h"
#include "launch/job/rank_process.h"
#include "launch/options/options.h"
#include "launch/plan/find_launcher.h"
#include "launch/plan/plan.h"
#include "launch/plan/routes.h"
#include "launch/reports/explain.h"
#include "launch/reports/generations.h"
#include "launch/reports/merge_generations.h"
#include "launch/reports/merge_timelines.h"
#include "launch/reports/read_records.h"

namespace sirtaki::launch {
namespace {

constexpr int kWrongUse = 2;
constexpr int kNoProgram = 127;  // as shells have it

int Complain(const core::Status& status) {
  std::fprintf(stderr, "sirtakirun: %s\n", status.message().c_str());
  return kWrongUse;
}

// A pipe, as bash gives for <(command), is read once; a file may be another for the next attempt.
core::FileReader ReaderOfFiles() {
  return [read = std::make_shared<std::map<std::string, std::string>>()](const std::string& path) {
    std::error_code error;
    if (std::filesystem::is_regular_file(path, error)) return core::ReadFile(path);
    if (const auto before = read->find(path); before != read->end()) {
      return std::optional(before->second);
    }
    std::optional<std::string> text = core::ReadFile(path);
    if (text) read->emplace(path, *text);
    return text;
  };
}

void SayNetwork(const Plan& plan) {
  if (plan.network.empty()) return;
  std::fprintf(stderr, "sirtakirun: network %s\n", plan.network.c_str());
}

int Print(const std::string& text) {
  return std::fputs(text.c_str(), stdout) < 0 || std::fflush(stdout) != 0 ? 1 : 0;
}

ThisMachine FindThisMachine(const LaunchOptions& options, const core::EnvironmentView& env) {
  const std::array<core::CpuShare, 1> own = {core::CpusOfThisProcess()};
  const std::string name = HostName();
  // Nobody else writes domains; it may take a while where names are not served.
  const bool named = !options.hosts.empty() || !options.hostfile.empty() ||
                     !options.host_discovery_script.empty() || env.Find("PBS_NODEFILE") ||
                     env.Find("LSB_MCPU_HOSTS");
  return {name, core::SharedCores(own), named ? FullNameOf(name) : name, OwnInterfaces()};
}

// The path is one that the other hosts have too.
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
  std::string from = spec.Variable();
  auto text = given != options.knobs.end() ? given->second : env.Find(from);
  if (!text) text = env.Find(from = "HOROVOD_START_TIMEOUT");
  if (text && !core::SetOptionFromText(spec, *text, &config)) {
    return {core::StatusCode::kInvalidArgument,
            from + "=" + *text + ": allowed is " + core::AllowedValues(spec)};
  }
  *out = config.start_timeout;
  return core::Status::Ok();
}

void PrintNotes(const std::vector<std::string>& notes) {
  for (const std::string& note : notes) std::fprintf(stderr, "sirtakirun: %s\n", note.c_str());
}

// The records are those of the ranks of a job that has run. Of an elastic one there may be none: its ranks
// set them aside when they go on.
int ExplainRecords(const std::string& folder) {
  std::vector<Generation> generations;
  core::Status status = ReadGenerations(folder, &generations);
  if (!status.ok()) return Complain(status);
  std::vector<core::trace::FlightRecord> records;
  std::vector<std::string> notes;
  status = ReadRecords(folder, &records, &notes);
  if (!status.ok() && generations.empty()) return Complain(status);
  const std::string before = folder + "/previous";
  if (std::map<int, std::string> paths; FindNumbered(before, "flight-", &paths).ok()) {
    notes.push_back(
        "records that these ranks had written before are told of by sirtakirun --explain " +
        before);
  }
  PrintNotes(notes);
  return Print(GenerationsText(generations) + (status.ok() ? Explain(std::move(records)) : ""));
}

int MergeTimelinesOf(const std::string& folder) {
  std::vector<std::string> notes;
  const std::string output = folder + "/timeline.json";
  std::vector<Generation> generations;
  core::Status status = ReadGenerations(folder, &generations);
  if (!status.ok()) return Complain(status);
  GenerationsTimeline timeline;
  if (generations.empty()) {
    status = FindTimelines(folder, &timeline.parts, &notes);
  } else {
    timeline = TimelineOf(folder, generations, &notes);
  }
  if (status.ok()) status = MergeTimelines(timeline.parts, timeline.objects, output);
  if (!status.ok()) return Complain(status);
  PrintNotes(notes);
  const std::size_t count =
      generations.empty() ? timeline.parts.size() : static_cast<std::size_t>(timeline.workers);
  std::string text = CountText(count, generations.empty() ? "rank" : "worker");
  if (!generations.empty()) text += " in " + CountText(generations.size(), "generation");
  return Print(text + " in " + output + "\n");
}

// 0 if ranks can start on the hosts of the plan, as far as one sees; else what to exit with.
int CheckHostsOf(const PlanInput& input, const Plan& plan) {
  if (plan.to_check.empty()) return 0;
  const HostWish wish = WishOfPlan(input, plan, CurrentFolder(), input.start_timeout);
  const HostsFound found = CheckHosts(
      wish, plan.to_check, input.environment,
      [](const std::string& line) { std::fprintf(stderr, "sirtakirun: %s\n", line.c_str()); });
  if (found.signal != 0) {
    std::fprintf(stderr, "sirtakirun: ended by %s\n", SignalName(found.signal).c_str());
    return 128 + found.signal;
  }
  if (found.failures.empty()) return 0;
  constexpr std::size_t kMostTold = 10;
  const std::size_t count = found.failures.size();
  for (std::size_t i = 0; i < std::min(count, kMostTold); ++i) {
    std::fprintf(stderr, "sirtakirun: %s\n", found.failures[i].c_str());
  }
  if (count > kMostTold) {
    std::fprintf(stderr, "sirtakirun: and %zu more hosts\n", count - kMostTold);
  }
  std::fputs("sirtakirun: nothing was started (--check-hosts=false skips these checks)\n", stderr);
  return kWrongUse;
}

// Whether the program can be started here, if ranks are here, as far as one sees. No rank needs to
// be started to learn that it cannot.
bool CheckProgram(const PlanInput& input, const Plan& plan) {
  const HostList& hosts = plan.placement.hosts;
  const bool here = std::any_of(hosts.begin(), hosts.end(), [&input](const Host& host) {
    return IsThisMachine(host.name, input.machine);
  });
  if (!here || input.options.ChoosesFolder() || !input.options.check_hosts) return true;
  core::EnvironmentView env = input.environment;
  for (const auto& [name, value] : plan.environment) env.Set(name, value);
  const std::string& program = input.options.program.front();
  std::string path;
  const std::string why = FindProgram(program, env, &path);
  if (why.empty()) return true;
  std::fprintf(stderr, "sirtakirun: program %s cannot be started (%s)%s\n",
               core::Quoted(program).c_str(), why.c_str(), MeantProgram(program).c_str());
  std::fputs("sirtakirun: nothing was started (--check-hosts=false skips this check)\n", stderr);
  return false;
}

int RunElastic(PlanInput input) {
  const LaunchOptions asked = input.options;
  Plan plan;
  Allocation allocation;
  core::Status status = FindAllocation(input.environment, input.read, &allocation);
  const bool in_allocation = status.ok() && allocation.system != BatchSystem::kNone;
  status = PrepareElastic(&input.options, in_allocation);
  if (status.ok()) status = MakePlan(input, &plan);
  ElasticLimits limits;
  if (status.ok()) {
    status = LimitsOf(asked, SlotsOf(plan.placement.hosts), input.start_timeout, input.environment,
                      &limits);
  }
  if (!status.ok()) return Complain(status);
  if (input.options.dry_run) return Print(PlanText(plan));
  if (input.options.verbose) std::fputs(PlanText(plan).c_str(), stderr);
  if (!CheckProgram(input, plan)) return kNoProgram;
  const int unfit = asked.host_discovery_script.empty() ? CheckHostsOf(input, plan) : 0;
  if (unfit != 0) return unfit;
  // The names of hosts that have come up since were not known yet, nor the way to them.
  if (plan.wait > core::Duration::zero()) status = MakePlan(input, &plan);
  if (!status.ok()) return Complain(status);
  SayNetwork(plan);
  const int slots = SlotsOf(plan.placement.hosts);
  if (asked.host_discovery_script.empty() && slots < limits.max_ranks) {
    std::fprintf(
        stderr,
        "sirtakirun: the job has at most %d of its %d ranks: the hosts have no more slots\n", slots,
        limits.max_ranks);
  }
  return RunElasticJob(plan, asked, input.machine, input.environment, limits);
}

// Carries the plan out, as often as it takes and is allowed.
int RunAll(PlanInput input) {
  SetHistoriesAside(input.options, input.environment);
  for (int code = kWrongUse;; ++input.restarts) {
    Plan plan;
    core::Status status = MakePlan(input, &plan);
    if (!status.ok()) {
      Complain(status);
      return code;
    }
    if (input.options.verbose) std::fputs(PlanText(plan).c_str(), stderr);
    if (input.restarts == 0 && !CheckProgram(input, plan)) return kNoProgram;
    const bool waits = plan.wait > core::Duration::zero();
    const int unfit = input.restarts == 0 || waits ? CheckHostsOf(input, plan) : 0;
    if (unfit != 0) return unfit;
    // The names of hosts that have come up since were not known yet, nor the way to them.
    if (waits) status = MakePlan(input, &plan);
    if (!status.ok()) return Complain(status);
    SayNetwork(plan);
    const JobResult result =
        RunJob(plan, input.options, input.restarts > 0, input.environment, input.start_timeout);
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

// A descriptor that is opened later must not become one of these by chance. False: it would.
bool OpenStandardStreams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) return false;
  }
  return true;
}

int Main(const std::vector<std::string>& args, const char* called) {
  if (!OpenStandardStreams()) return kWrongUse;  // nobody could read why
  if (args.size() > 2 && args[0] == kRankFlag && args[1] == "--") {
    return RunAsRank({args.begin() + 2, args.end()});
  }
  if (args.size() > 1 && args[0] == kLauncherFlag)
    return RunAsLauncher({args.begin() + 1, args.end()});
  if (args.size() > 1 && args[0] == kDaemonFlag) return RunAsDaemon({args.begin() + 1, args.end()});
  if (args.size() == 4 && args[0] == kHostFlag) {
    const auto report = LookAtHost(args[1], args[2], args[3], core::EnvironmentView::OfProcess());
    return Print(ReportText(report));
  }
  PlanInput input;
  input.read = ReaderOfFiles();
  core::Status status = ParseOptions(args, input.read, &input.options);
  if (!status.ok()) return Complain(status);
  if (input.options.help) return Print(HelpText());
  if (input.options.version) {
    return Print("sirtakirun " + std::string(FactsOfBuild().version) + "\n");
  }

  if (!input.options.explain.empty()) return ExplainRecords(input.options.explain);
  if (!input.options.merge_timelines.empty()) {
    return MergeTimelinesOf(input.options.merge_timelines);
  }

  input.environment = core::EnvironmentView::OfProcess();
  if (input.options.check_build) {
    const std::string self = OwnPath(called);
    std::vector<BuildRow> parts = FindParts(self, input.environment);
    AddCures(FactsOfBuild(), &parts);
    return Print(BuildText(FactsOfBuild(), self, parts));
  }
  input.machine = FindThisMachine(input.options, input.environment);
  input.is_root = geteuid() == 0;
  input.self = OwnPath(called);
  input.route = &FindRoute;
  status = FindStartTimeout(input.options, input.environment, &input.start_timeout);
  if (status.ok()) {
    status =
        FindLauncher(input.options.launcher, input.environment, FactsOfBuild(), &input.launcher);
  }
  if (input.launcher.path.empty()) input.launcher.path = input.self;
  if (!status.ok()) return Complain(status);

  // ssh would go on without it.
  const std::string& key = input.options.ssh_identity_file;
  if (!key.empty() && access(key.c_str(), R_OK) != 0) {
    return Complain({core::StatusCode::kInvalidArgument, input.options.Called("ssh-identity-file") +
                                                             ": " + core::Quoted(key) + ": " +
                                                             std::strerror(errno)});
  }
  for (const std::string& note : input.options.notes) {
    std::fprintf(stderr, "sirtakirun: %s\n", note.c_str());
  }
  if (input.options.elastic) return RunElastic(std::move(input));
  if (!input.options.dry_run) return RunAll(std::move(input));
  Plan plan;
  status = MakePlan(input, &plan);
  if (!status.ok()) return Complain(status);
  return Print(PlanText(plan));
}

}  // namespace
}  // namespace sirtaki::launch

int main(int argc, char** argv) try {
  return sirtaki::launch::Main({argv + 1, argv + argc}, argv[0]);
} catch (const std::exception& error) {  // where no file can be opened any more, for one
  return sirtaki::launch::Complain({sirtaki::core::StatusCode::kBackend, error.what()});
}
