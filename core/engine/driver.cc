#include "core/engine/driver_inl.h"

namespace sirtaki::core {

template class BasicDriver<ThreadSync>;

}  // namespace sirtaki::core
