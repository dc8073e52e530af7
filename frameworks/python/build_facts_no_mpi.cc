#include "frameworks/python/build_facts.h"

namespace sirtaki::python {

const bool kMpiBuilt = false;

bool MpiThreadsMultiple() { return false; }

}  // namespace sirtaki::python
