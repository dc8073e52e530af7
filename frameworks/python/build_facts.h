// What this build has, for the functions that Horovod's programs ask.
#pragma once

namespace sirtaki::python {

extern const bool kMpiBuilt;

// MPI is initialised, and all threads may call it at once.
bool MpiThreadsMultiple();

}  // namespace sirtaki::python
