// Collectives of a world of one rank: what is left of them is a copy.
#pragma once

#include "core/base/status.h"
#include "core/engine/work.h"
#include "session/base/devices.h"

namespace sirtaki::session {

// RunInSingleProcess carries out the work on the calling thread, or puts it into the stream that makes
// its input, on a GPU of `devices`; gives the status that its handle is to be completed with.
// kInvalidArgument if the request is invalid, kBackend if the output could not be allocated, and what
// Gpu::Copy gives.
core::Status RunInSingleProcess(core::Work& work, Devices& devices);

}  // namespace sirtaki::session
