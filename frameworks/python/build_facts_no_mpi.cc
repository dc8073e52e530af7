#include "frameworks/python/build_facts.h"

namespace sirtaki::python {

const bool kMpiBuilt = false;

}  // namespace sirtaki::python
