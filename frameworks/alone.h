// Collectives of a world of one rank: what is left of them is a copy.
#pragma once

#include "core/status.h"
#include "core/work.h"

namespace sirtaki::frameworks {

// Carries out the work on the calling thread; gives the status that its handle is to be completed
// with. kInvalidArgument if the request is invalid, kBackend if the output could not be allocated.
core::Status RunAlone(const core::Work& work);

}  // namespace sirtaki::frameworks
