#include "ops/nccl/process_communicators.h"

#include <system_error>
#include <utility>

#include "core/threads/quiet_thread.h"
#include "ops/base/keep_forever.h"

namespace sirtaki::ops::nccl {
namespace {

// A call of a communicator that does not block is over in far less.
constexpr auto kCallLimit = std::chrono::milliseconds(100);

}  // namespace

void ProcessCommunicators::Add(std::shared_ptr<SharedHandle> handle) {
  core::MutexLock lock(mutex_);
  all_.insert(std::move(handle));
}

void ProcessCommunicators::Remove(const std::shared_ptr<SharedHandle>& handle) {
  core::MutexLock lock(mutex_);
  all_.erase(handle);
}

void ProcessCommunicators::AbortAll(std::shared_ptr<const cuda::Device> device) {
  core::MutexLock lock(mutex_);
  while (!all_.empty()) {
    const std::shared_ptr<SharedHandle> handle = *all_.begin();
    try {
      core::StartQuietThread([self = shared_from_this(), device, handle]() mutable {
        const bool aborted = self->Abort(*device, *handle);
        device.reset();  // whoever waits for this may end CUDA's part of it next
        core::MutexLock ended(self->mutex_);
        if (!aborted) self->all_.insert(handle);
        --self->aborting_;
        self->over_.NotifyAll();
      }).detach();
    } catch (const std::system_error&) {
      break;  // there is no thread to be had: the rest is left for the next call
    }
    all_.erase(handle);
    ++aborting_;
    until_ = core::Clock::now() + kAbortGrace;
  }
  while (aborting_ > 0 && over_.WaitUntil(mutex_, until_)) {
  }
  // A thread that is left behind must not be the last to let go of the device: the process may exit.
  if (aborting_ > 0) KeepForever(std::const_pointer_cast<cuda::Device>(device));
}

bool ProcessCommunicators::Abort(const cuda::Device& device, SharedHandle& handle) const {
  if (!handle.gate.LockUntil("ncclCommAbort", core::Clock::now() + kCallLimit)) return false;
  handle.aborted = true;
  const CommHandle comm = std::exchange(handle.comm, nullptr);
  handle.gate.Unlock();
  if (comm == nullptr) return true;
  // NCCL leaves a thread with the device that it had; with none, it would make a context on the
  // first.
  static_cast<void>(device.Adopt());
  static_cast<void>(api_->CommAbort(comm));
  return true;
}

}  // namespace sirtaki::ops::nccl
