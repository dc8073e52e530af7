// The launcher that is installed here.
#pragma once

#include <optional>
#include <string>

#include "core/base/environment.h"
#include "core/base/status.h"
#include "launch/base/build_facts.h"
#include "launch/hosts/launcher.h"

namespace sirtaki::launch {

// `wanted` as --launcher has it: auto, mpi, openmpi, mpich, srun, sirtakirun, or a path. Asks what is
// found for its version, 10 s at most each. auto and mpi prefer that of the MPI of the `build`:
// another one's cannot start its ranks. auto takes sirtakirun, without a path, where none is there
// at all. kUnsupported if there is none of that kind: says what was tried, and what to
// install.
core::Status FindLauncher(const std::string& wanted, const core::EnvironmentView& env,
                          const BuildFacts& build, Launcher* out);

// The path of a program that is searched for as a shell does; empty if there is none.
std::string FindOnPath(const std::string& name, const core::EnvironmentView& env);
// Finds what stands at the path, if it is a launcher. Asks it for its version, 10 s at most.
std::optional<Launcher> AskLauncher(const std::string& path);

}  // namespace sirtaki::launch
