// The memory of one tensor's part in a call: what the operation reads, what it writes, and what the
// caller gets.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/engine/work.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/session/set_membership.h"
#include "ops/cuda/device_work.h"
#include "session/base/devices.h"

namespace sirtaki::detail {

// Where an output appears whose rows nobody knows before: made on the lane's thread, before the
// handle completes.
struct Arriving {
  at::Tensor tensor;
  std::vector<std::int64_t> rows;  // from each member
};

// A call keeps this of a tensor on a GPU.
struct OnGpu {
  std::shared_ptr<session::Gpu> gpu;
  // The work is kept until somebody has seen its end: it keeps what the operation reads.
  std::shared_ptr<ops::cuda::DeviceWork> work;
  ops::cuda::StreamHandle caller = nullptr;  // to whose stream the call's memory belongs
  ops::cuda::EventPtr end;                   // behind it the result is as it should be
};

struct CallMemory {
  at::Tensor result;  // what the caller gets; undefined before the end if `arriving`
  at::Tensor moved;  // what the operation writes; differs from the result if that does not lie flat
  std::shared_ptr<Arriving> arriving;
  std::optional<OnGpu> on_gpu;  // none: on the host

  // After the operation, if it went well, and behind AwaitOnGpus: the result is as it should be.
  // True if it had to be copied, on a GPU in the stream that is current.
  bool Settle();
};

// A call has one for each of its tensors, most often one.
using CallMemories = c10::SmallVector<CallMemory, 1>;

// The storages are kept, not the tensors: the program may give these other memory meanwhile.
struct CallStorages {
  c10::Storage input;
  c10::Storage output;
};

// Fills in the work's memory for tensor `index` of the call. Throws what LibTorch throws when there
// is no memory. Precondition: FillIn has found nothing wrong. `work`: for a tensor on a GPU
// a DeviceWork. `*storages` become those that it reads and writes, and live as long as it.
CallMemory GiveMemory(const TensorCall& call, std::size_t index, const CallMembers& members,
                      core::Work& work, CallStorages* storages);

}  // namespace sirtaki::detail
