// Whether the process has been forked since something was made: a child inherits objects but no
// threads.
#pragma once

namespace sirtaki::core {

// A number that changes in every forked child. Thread-safe, costs a load.
int ForkGeneration();

}  // namespace sirtaki::core
