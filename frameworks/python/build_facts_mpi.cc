#include "frameworks/python/build_facts.h"

namespace sirtaki::python {

const bool kMpiBuilt = true;

}  // namespace sirtaki::python
