#include "launch/plan/find_launcher.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <optional>
#include <vector>

#include "core/base/text.h"
#include "launch/base/run_commands.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

constexpr auto kPatience = std::chrono::seconds(10);

// The text is what the program prints when asked; if there is nothing, `*why`.
std::optional<std::string> VersionText(const std::string& path, std::string* why) {
  int signal = 0;
  const CommandOutcome outcome =
      RunCommands({{{path, "--version"}, {}, {}}}, kPatience, 1, &signal).front();
  if (signal != 0) raise(signal);  // nothing has begun that must be ended first
  if (!outcome.why.empty()) *why = "cannot be started";
  if (outcome.why.empty() && !outcome.in_time) {
    *why = "gives no answer within " + core::DurationText(kPatience);
  }
  if (!why->empty()) return std::nullopt;
  return outcome.output + outcome.error;
}

struct Wish {
  std::string_view word;
  std::vector<std::string> programs;
  std::vector<LauncherKind> kinds;
};

Wish WishOf(const std::string& wanted, bool in_slurm, const BuildFacts& build) {
  using K = LauncherKind;
  if (wanted == "openmpi") return {wanted, {"mpirun", "mpiexec"}, {K::kOpenMpi4, K::kOpenMpi5}};
  if (wanted == "mpich")
    return {wanted, {"mpirun", "mpiexec", "mpiexec.hydra"}, {K::kMpich, K::kIntel}};
  if (wanted == "srun") return {wanted, {"srun"}, {K::kSrun}};
  Wish wish{wanted,
            {"mpirun", "mpiexec", "mpiexec.hydra"},
            {K::kOpenMpi4, K::kOpenMpi5, K::kMpich, K::kIntel, K::kSrun}};
  if (!build.mpiexec.empty()) wish.programs.emplace_back(build.mpiexec);
  if (in_slurm) wish.programs.emplace_back("srun");
  return wish;
}

// A launcher is of the build's MPI if both say "Open MPI 4.": what another major version starts may
// not find the other ranks.
bool IsOf(const Launcher& launcher, const BuildFacts& build) {
  const std::string name = launcher.ShortName();
  return build.mpi.starts_with(name.substr(0, name.find('.') + 1));
}

std::string Cure(const std::string& wanted) {
  if (wanted == "mpich") return "; Debian's mpich has an mpiexec";
  if (wanted == "srun") return "; srun is for jobs of Slurm";
  const std::string debian = "; Debian's openmpi-bin has an mpirun";
  if (wanted == "auto") return debian + ", and --no-mpi starts the ranks without an MPI";
  return wanted == "mpi" || wanted == "openmpi" ? debian : "";
}

}  // namespace

std::string FindOnPath(const std::string& name, const core::EnvironmentView& env) {
  const std::string folders = env.Find("PATH").value_or("/usr/local/bin:/usr/bin:/bin");
  for (const std::string_view folder : Split(folders, ':')) {
    std::string path = std::string(folder.empty() ? "." : folder) + "/" + name;
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return "";
}

std::optional<Launcher> AskLauncher(const std::string& path) {
  std::string why;
  return RecognizeLauncher(path, VersionText(path, &why).value_or(""));
}

Status FindLauncher(const std::string& wanted, const core::EnvironmentView& env,
                    const BuildFacts& build, Launcher* out) {
  const std::string version(build.version);
  if (wanted == "sirtakirun") {
    *out = {LauncherKind::kOwn, "", version, "as asked for"};
    return Status::Ok();
  }
  const auto is_path = [](const std::string& name) { return name.find('/') != std::string::npos; };
  const Wish wish = WishOf(wanted, env.Find("SLURM_JOB_ID").has_value(), build);
  const bool prefers = (wanted == "auto" || wanted == "mpi") && !build.mpiexec.empty();
  std::optional<Launcher> other;  // the first one of another MPI
  std::vector<std::string> tried;
  bool some = false;  // of what was tried is there
  for (const std::string& name :
       is_path(wanted) ? std::vector<std::string>{wanted} : wish.programs) {
    const std::string path = is_path(name) ? name : FindOnPath(name, env);
    if (path.empty()) {
      tried.push_back(name + ": not on PATH");
      continue;
    }
    if (is_path(name) && name != wanted && access(name.c_str(), F_OK) != 0) {
      tried.push_back(name + ": is not there");
      continue;
    }
    some = true;
    std::string why;
    const auto text = VersionText(path, &why);
    const auto launcher = RecognizeLauncher(path, text.value_or(""));
    if (!text) {
      tried.push_back(path + ": " + why);
    } else if (!launcher) {
      const std::string first(text->substr(0, text->find('\n')));
      tried.push_back(path + ": is not a known launcher (it says " + core::Quoted(first) + ")");
    } else if (std::find(wish.kinds.begin(), wish.kinds.end(), launcher->kind) ==
               wish.kinds.end()) {
      tried.push_back(path + ": is " + launcher->ToString());
    } else if (prefers && !IsOf(*launcher, build)) {
      if (!other) other = launcher;
    } else {
      *out = *launcher;
      return Status::Ok();
    }
  }
  if (other) {
    *out = *other;
    return Status::Ok();
  }
  // One that does not work is an error: ranks would not talk as they did when it worked.
  if (wanted == "auto" && !some) {
    *out = {LauncherKind::kOwn, "", version,
            "as no launcher of an MPI was found (" + Joined(tried, "; ") + ")"};
    return Status::Ok();
  }
  return {StatusCode::kUnsupported, "--launcher " + wanted +
                                        ": no launcher was found that can start ranks (" +
                                        Joined(tried, "; ") + ")" + Cure(wanted)};
}

}  // namespace sirtaki::launch
