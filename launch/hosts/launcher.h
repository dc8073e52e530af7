// The programs that can start ranks. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sirtaki::launch {

// kOwn: sirtakirun starts the ranks itself, and no MPI is needed.
enum class LauncherKind : std::uint8_t { kOpenMpi4, kOpenMpi5, kMpich, kIntel, kSrun, kOwn };
std::string_view LauncherName(LauncherKind kind);  // "Open MPI", "MPICH", "Intel MPI", …

struct Launcher {
  LauncherKind kind{};
  std::string path;
  std::string version;            // "4.1.4"
  std::string why;                // it was taken; empty: no reason needs to be told
  std::string ShortName() const;  // "Open MPI 4.1.4"
  std::string ToString() const;   // "Open MPI 4.1.4 (/usr/bin/mpirun)"
};

// A launcher is recognised by what the program at `path` prints when asked for its version; none if
// that is no launcher that is known here.
std::optional<Launcher> RecognizeLauncher(std::string_view path, std::string_view version_text);

}  // namespace sirtaki::launch
