// What this build has, for the functions that Horovod's programs ask.
#pragma once

namespace sirtaki::python {

extern const bool kMpiBuilt;

}  // namespace sirtaki::python
