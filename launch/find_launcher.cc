#include "launch/find_launcher.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <optional>
#include <utility>
#include <vector>

#include "core/text.h"
#include "core/types.h"
#include "launch/child.h"
#include "launch/words.h"

namespace sirtaki::launch {

using core::Clock;
using core::Status;
using core::StatusCode;

namespace {

constexpr auto kPatience = std::chrono::seconds(10);

std::string OnPath(const std::string& name, const core::EnvironmentView& env) {
  for (const std::string_view folder :
       Split(env.Find("PATH").value_or("/usr/local/bin:/usr/bin:/bin"), ':')) {
    std::string path = std::string(folder.empty() ? "." : folder) + "/" + name;
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return "";
}

// What the program prints when asked; nothing if it does not answer.
std::optional<std::string> VersionText(const std::string& path) {
  Child child;
  int error = 0;
  if (!SignalPipe::Open().ok() || !child.Start({{path, "--version"}, {}, {}, true}, &error).ok()) {
    return std::nullopt;
  }
  std::string text;
  const core::TimePoint deadline = Clock::now() + kPatience;
  while (child.output().valid() || child.error().valid()) {
    std::array<pollfd, 2> fds = {
        {{child.output().get(), POLLIN, 0}, {child.error().get(), POLLIN, 0}}};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) break;
    if (poll(fds.data(), fds.size(), static_cast<int>(left.count())) <= 0) continue;
    if (fds[0].revents != 0 && ReadSome(fds[0].fd, &text).ended) child.CloseOutput();
    if (fds[1].revents != 0 && ReadSome(fds[1].fd, &text).ended) child.CloseError();
  }
  child.Signal(SIGKILL);  // if it has not ended by itself
  std::vector<int> asked;
  while (child.running() && !child.Ended()) {
    pollfd signals{SignalPipe::fd(), POLLIN, 0};
    poll(&signals, 1, 10);
    for (const int signal : SignalPipe::Take()) {
      if (signal != SIGCHLD) asked.push_back(signal);
    }
  }
  for (const int signal : asked) raise(signal);  // the run is to hear of them
  return text;
}

struct Wish {
  std::string_view word;
  std::vector<std::string> programs;
  std::vector<LauncherKind> kinds;
};

Wish WishOf(const std::string& wanted, bool in_slurm) {
  using K = LauncherKind;
  if (wanted == "openmpi") return {wanted, {"mpirun", "mpiexec"}, {K::kOpenMpi4, K::kOpenMpi5}};
  if (wanted == "mpich") return {wanted, {"mpirun", "mpiexec", "mpiexec.hydra"}, {K::kMpich}};
  if (wanted == "srun") return {wanted, {"srun"}, {K::kSrun}};
  Wish wish{wanted,
            {"mpirun", "mpiexec", "mpiexec.hydra"},
            {K::kOpenMpi4, K::kOpenMpi5, K::kMpich, K::kSrun}};
  if (in_slurm) wish.programs.emplace_back("srun");
  return wish;
}

}  // namespace

Status FindLauncher(const std::string& wanted, const core::EnvironmentView& env, Launcher* out) {
  const bool is_path = wanted.find('/') != std::string::npos;
  const Wish wish = WishOf(wanted, env.Find("SLURM_JOB_ID").has_value());
  std::vector<std::string> tried;
  for (const std::string& name : is_path ? std::vector<std::string>{wanted} : wish.programs) {
    const std::string path = is_path ? wanted : OnPath(name, env);
    if (path.empty()) {
      tried.push_back(name + ": not on PATH");
      continue;
    }
    const auto text = VersionText(path);
    const auto launcher = RecognizeLauncher(path, text.value_or(""));
    if (!text) {
      tried.push_back(path + ": cannot be started");
    } else if (!launcher) {
      const std::string first(text->substr(0, text->find('\n')));
      tried.push_back(path + ": is none that is known here (it says " + core::Quoted(first) + ")");
    } else if (std::find(wish.kinds.begin(), wish.kinds.end(), launcher->kind) ==
               wish.kinds.end()) {
      tried.push_back(path + ": is " + launcher->ToString());
    } else {
      *out = *launcher;
      return Status::Ok();
    }
  }
  return {StatusCode::kUnsupported,
          "--launcher " + wanted + ": nothing found that can start ranks (" + Joined(tried, "; ") +
              "); Debian's openmpi-bin has an mpirun"};
}

}  // namespace sirtaki::launch
