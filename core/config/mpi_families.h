// The families of MPIs. Those of one family have the same handles and constants, and names of their
// library by which the dynamic linker finds it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/config/config.h"

namespace sirtaki::core {

struct MpiFamily {
  MpiChoice choice = MpiChoice::kNone;
  std::string name;   // as the option mpi_family has it
  std::string label;  // "MPICH or one of its family"
  std::vector<std::string> libraries;
  // A launcher of the family sets one of these.
  std::vector<std::string> variables;

  // Our module for it, which lies beside libsirtaki.so.
  std::string module() const { return "libsirtaki_mpi_" + name + ".so"; }
};

std::span<const MpiFamily> MpiFamilies();

}  // namespace sirtaki::core
