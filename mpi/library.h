// The MPI of this process: the one that the program has, else the one that has launched it, else the
// first that the dynamic linker finds. It is opened together with the module for its family, which
// lies beside the library; programs that are linked with a module have that one.
#pragma once

#include <string>
#include <vector>

#include "core/base/environment.h"
#include "core/base/status.h"
#include "core/config/config.h"
#include "mpi/api.h"

namespace sirtaki::mpi {

// Opens it, once; a later call that succeeds finds the same. `variables`: those of launchers. Errors:
//   kUnsupported      there is no MPI, or `choice` is kNone; or there is one that the dynamic linker
//                     finds, but no module for it
//   kInvalidArgument  the program has another MPI than `choice`
//   kBackend          the program or its launcher has one for which there is no module, or there are
//                     two
core::Status OpenMpi(core::MpiChoice choice, const core::EnvironmentView& variables);

// Precondition: OpenMpi has succeeded.
const Api& TheApi();
// Which MPI it is and why, for the log: "libmpi.so.40, which the program has"; empty: it is linked.
const std::string& WhyThisMpi();

// The families for which there is a module.
std::vector<std::string> FamiliesOfModules();

}  // namespace sirtaki::mpi
