// The facts say what this build is, as decided when it was configured.
#pragma once

#include <string_view>

namespace sirtaki::launch {

// One line each, "off: …" or "not …" with the reason where it is not there; except for the first and
// the last.
struct BuildFacts {
  std::string_view version;  // "0.1.0"
  std::string_view mpi;
  std::string_view torch;
  std::string_view cuda;
  std::string_view mpiexec;  // the path of that MPI's launcher; empty if there is none
};

BuildFacts FactsOfBuild();

}  // namespace sirtaki::launch
