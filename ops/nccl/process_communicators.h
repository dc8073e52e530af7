// The communicators of this process: what aborts them, all together.
//
// An abort waits. NCCL tells the kernels of the communicator to end, then waits until the last of
// them has left its stream, and frees memory, for which the device is waited for. Kernels of all
// communicators share a lane's stream: if the one in front is stuck and is not told to end, the
// abort of another one never returns. So each is aborted by a thread of its own, all at once; and
// as NCCL may get stuck even so, nobody waits for these threads without a limit. A group of NCCL's
// would not do: it aborts the next one only when a call of the first that is in progress has ended,
// which may wait for the next.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "core/threads/gate.h"
#include "ops/cuda/device.h"
#include "ops/nccl/nccl_api.h"

namespace sirtaki::ops::nccl {

// A communicator's handle: its lane calls NCCL with it, and whoever aborts takes it away.
struct SharedHandle {
  explicit SharedHandle(std::string its_name) : name(std::move(its_name)) {}

  const std::string name;     // NCCL keeps a pointer to it
  core::Gate gate;            // whoever calls NCCL with it, or changes it, is in here
  CommHandle comm = nullptr;  // null: not made yet, finalized or aborted
  // The parent is what `comm`, whose calls block, was split from; null: `comm` was not. Nobody calls
  // it but to end it: its abort ends a call of `comm` that another thread is stuck in, for they share
  // what tells them to abort.
  std::atomic<CommHandle> parent{nullptr};
  CommHandle split = nullptr;         // NCCL writes the one here that is being split from `comm`
  std::atomic<bool> aborted = false;  // nothing is called any more, and nothing made
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

  // True once: what concerns all communicators is said for one of them.
  bool IsFirstToWarn() { return !has_warned_.exchange(true); }

  // Aborts all that there are, on a thread each. Returns when that has been done, here or in
  // another call, or after kAbortGrace: the threads are left behind then. A communicator that
  // another thread is stuck in is left for the next call, unless it has a parent. `device`: one of
  // this process. False: some are not aborted, or not yet.
  bool AbortAll(std::shared_ptr<const cuda::Device> device) SIRTAKI_EXCLUDES(mutex_);
  // StartAbortAll does the same, and waits for nothing.
  void StartAbortAll(const std::shared_ptr<const cuda::Device>& device) SIRTAKI_EXCLUDES(mutex_);
  // StartAbortIfInCall does so if a thread is in a call that blocks, of whichever: the call may be stuck
  // behind the kernel of another one. A thread that was told to stop before this makes no call any more.
  void StartAbortIfInCall(const std::shared_ptr<const cuda::Device>& device)
      SIRTAKI_EXCLUDES(mutex_);
  // AbortOne aborts one communicator, and returns when that is done; AbortAll waits for it, too.
  // Preconditions: the caller's device is the communicator's, and its stream has nothing else.
  void AbortOne(const std::shared_ptr<SharedHandle>& handle) SIRTAKI_EXCLUDES(mutex_);

 private:
  void StartThreads(const std::shared_ptr<const cuda::Device>& device) SIRTAKI_REQUIRES(mutex_);
  // Abort returns whether it could: false if another thread is stuck in a call of it. The caller's
  // device is that of the communicator.
  bool Abort(SharedHandle& handle) const;
  void NoteAborted(const std::shared_ptr<SharedHandle>& handle, bool aborted)
      SIRTAKI_EXCLUDES(mutex_);

  const std::shared_ptr<const Api> api_;
  std::atomic<bool> has_warned_{false};
  core::Mutex mutex_;
  core::CondVar over_;
  std::set<std::shared_ptr<SharedHandle>> all_ SIRTAKI_GUARDED_BY(mutex_);
  int aborting_ SIRTAKI_GUARDED_BY(mutex_) = 0;  // by as many threads
  core::TimePoint until_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::ops::nccl
