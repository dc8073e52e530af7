// These functions wait for other ranks and move no data: barrier, monitored_barrier, join.
#pragma once

#include <torch/arg.h>

#include <chrono>
#include <string>

#include "sirtaki/export.h"
#include "sirtaki/handle.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

// The fields mean what they mean in AllreduceOptions.
struct BarrierOptions {
  TORCH_ARG(std::string, name);
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

struct JoinOptions {
  TORCH_ARG(ProcessSet, process_set);
  TORCH_ARG(std::chrono::milliseconds, timeout) = std::chrono::milliseconds(0);
};

// Waits until every rank of the set has called it. Operations that were started before need not be
// done. Collective over the set.
SIRTAKI_API void barrier(const BarrierOptions& options = {});
// Starts a barrier and returns at once. The tensor of the handle is undefined.
SIRTAKI_API Handle barrier_async(const BarrierOptions& options = {});

// Waits as barrier() does, for at most `timeout`, which replaces the time-out of the options and
// must be positive. If a rank has not come by then, the whole group fails with TimedOut, and the
// text names the ranks that are missing.
SIRTAKI_API void monitored_barrier(std::chrono::milliseconds timeout,
                                   const BarrierOptions& options = {});

// Says that this rank submits nothing more to the set, because it has run out of data before
// others, and waits until every rank of the set has said so. Meanwhile this rank takes part in what
// the others call: in a reduction with what changes nothing (an average still divides by all
// ranks), in gathers and all-to-all with no rows. An operation whose root has joined fails with
// InvalidArgument. Returns the rank that came last, the same on all ranks. Afterwards calls
// without a name are counted from the beginning again. Collective over the set; throws ShutDown if
// a rank of the set has left the job instead.
SIRTAKI_API int join(const JoinOptions& options = {});

}  // namespace sirtaki
