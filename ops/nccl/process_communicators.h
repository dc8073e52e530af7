// The communicators of this process: what aborts them, all together.
//
// An abort waits. NCCL tells the kernels of the communicator to end, then waits until the last of them
// has left its stream, and frees memory, for which the device is waited for. Kernels of all communicators
// share a lane's stream: if the one in front is stuck and is not told to end, the abort of another one
// never returns. So all are told before one is waited for; and as NCCL may get stuck even so, nobody
// waits for it without a limit.
#pragma once

#include <chrono>
#include <memory>
#include <set>
#include <utility>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "core/threads/gate.h"
#include "ops/cuda/device.h"
#include "ops/nccl/nccl_api.h"

namespace sirtaki::ops::nccl {

// A communicator's handle: its lane calls NCCL with it, and whoever aborts takes it away.
struct SharedHandle {
  core::Gate gate;            // whoever calls NCCL with it, or changes it, is in here
  CommHandle comm = nullptr;  // null: not made yet, finalized or aborted
};

// AbortAll waits this long for NCCL.
inline constexpr auto kAbortGrace = std::chrono::seconds(1);

// Thread-safe. The lanes of a process share one.
class ProcessCommunicators : public std::enable_shared_from_this<ProcessCommunicators> {
 public:
  // `api`: filled in before the first communicator is made.
  explicit ProcessCommunicators(std::shared_ptr<const Api> api) : api_(std::move(api)) {}

  const std::shared_ptr<const Api>& api() const { return api_; }

  void Add(std::shared_ptr<SharedHandle> handle) SIRTAKI_EXCLUDES(mutex_);
  void Remove(const std::shared_ptr<SharedHandle>& handle) SIRTAKI_EXCLUDES(mutex_);

  // Aborts all that there are, in one group of NCCL's, on a thread of its own. Returns when that has
  // been done, here or in another call, or after kAbortGrace: the thread is left behind then. A
  // communicator that another thread is stuck in is left out. `device`: one of this process.
  void AbortAll(std::shared_ptr<const cuda::Device> device) SIRTAKI_EXCLUDES(mutex_);

 private:
  using Handles = std::set<std::shared_ptr<SharedHandle>>;
  void Abort(const cuda::Device& device, const Handles& handles) const;

  const std::shared_ptr<const Api> api_;
  core::Mutex mutex_;
  core::CondVar over_;
  Handles all_ SIRTAKI_GUARDED_BY(mutex_);
  int aborting_ SIRTAKI_GUARDED_BY(mutex_) = 0;  // threads
  core::TimePoint until_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::ops::nccl
