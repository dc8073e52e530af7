#include "launch/hosts/launcher.h"

#include <regex>

#include "core/base/text.h"

namespace sirtaki::launch {

std::string_view LauncherName(LauncherKind kind) {
  static constexpr std::string_view kNames[] = {"Open MPI",  "Open MPI", "MPICH",
                                                "Intel MPI", "Slurm",    "sirtakirun"};
  return core::NameIn(kNames, kind);
}

std::string Launcher::ShortName() const { return std::string(LauncherName(kind)) + " " + version; }

std::string Launcher::ToString() const { return ShortName() + " (" + path + ")"; }

std::optional<Launcher> RecognizeLauncher(std::string_view path, std::string_view version_text) {
  // "mpirun (Open MPI) 4.1.4", "mpirun (OpenRTE) 4.1.4"; HYDRA's "Version:   4.0.2" on a line of
  // its own; "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929"; "slurm-wlm
  // 22.05.8", "slurm 23.11.1"; "sirtakirun 0.1.0".
  static const std::regex open_mpi(R"(\((?:Open MPI|OpenRTE)\) (\d+)(\.[0-9.]+)?)");
  static const std::regex hydra(R"(HYDRA[^\n]*\n\s*Version:\s*([0-9.]+))");
  static const std::regex intel(R"(^Intel\(R\) MPI Library[^\n]* Version ([0-9.]+))");
  static const std::regex slurm(R"(^slurm(?:-wlm)? ([0-9.]+))");
  static const std::regex own(R"(^sirtakirun ([0-9.]+))");
  const std::string text(version_text);
  std::smatch match;
  if (std::regex_search(text, match, open_mpi)) {
    const int major = std::stoi(match[1].str().substr(0, 4));
    if (major < 4) return std::nullopt;  // too old for what is asked of it
    return Launcher{major == 4 ? LauncherKind::kOpenMpi4 : LauncherKind::kOpenMpi5,
                    std::string(path), match[1].str() + match[2].str()};
  }
  for (const auto& [pattern, kind] : {std::pair(&hydra, LauncherKind::kMpich),
                                      {&intel, LauncherKind::kIntel},
                                      {&slurm, LauncherKind::kSrun},
                                      {&own, LauncherKind::kOwn}}) {
    if (!std::regex_search(text, match, *pattern)) continue;
    return Launcher{kind, std::string(path), match[1].str()};
  }
  return std::nullopt;
}

}  // namespace sirtaki::launch
