#include "ops/nccl/process_communicators.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "core/threads/quiet_thread.h"
#include "ops/base/keep_forever.h"

namespace sirtaki::ops::nccl {
namespace {

// A call of a communicator that waits for no other rank is over in far less.
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

void ProcessCommunicators::StartThreads(const std::shared_ptr<const cuda::Device>& device) {
  while (!all_.empty()) {
    const std::shared_ptr<SharedHandle> handle = *all_.begin();
    try {
      core::StartQuietThread([self = shared_from_this(), device = device, handle]() mutable {
        // NCCL leaves a thread with the device that it had; with none, it would make a context on
        // the first.
        static_cast<void>(device->Adopt());
        const bool aborted = self->Abort(*handle);
        device.reset();  // whoever waits for this may end CUDA's part of it next
        self->NoteAborted(handle, aborted);
      }).detach();
    } catch (const std::system_error&) {
      return;  // there is no thread to be had: the rest is left for the next call
    }
    all_.erase(handle);
    ++aborting_;
    until_ = core::Clock::now() + kAbortGrace;
  }
}

bool ProcessCommunicators::AbortAll(std::shared_ptr<const cuda::Device> device) {
  core::MutexLock lock(mutex_);
  StartThreads(device);
  while (aborting_ > 0 && over_.WaitUntil(mutex_, until_)) {
  }
  // A thread that is left behind must not be the last to let go of the device: the process may exit.
  if (aborting_ > 0) KeepForever(std::const_pointer_cast<cuda::Device>(device));
  return aborting_ == 0 && all_.empty();
}

void ProcessCommunicators::StartAbortAll(const std::shared_ptr<const cuda::Device>& device) {
  core::MutexLock lock(mutex_);
  StartThreads(device);
}

void ProcessCommunicators::StartAbortIfInCall(const std::shared_ptr<const cuda::Device>& device) {
  core::MutexLock lock(mutex_);
  const auto is_in_call = [](const std::shared_ptr<SharedHandle>& handle) {
    return handle->parent != nullptr && handle->gate.IsHeld();
  };
  if (std::any_of(all_.begin(), all_.end(), is_in_call)) StartThreads(device);
}

void ProcessCommunicators::AbortOne(const std::shared_ptr<SharedHandle>& handle) {
  {
    core::MutexLock lock(mutex_);
    if (all_.erase(handle) == 0) return;  // it was finalized, or is aborted with all
    ++aborting_;
    until_ = core::Clock::now() + kAbortGrace;
  }
  NoteAborted(handle, Abort(*handle));
}

void ProcessCommunicators::NoteAborted(const std::shared_ptr<SharedHandle>& handle, bool aborted) {
  core::MutexLock lock(mutex_);
  if (!aborted) all_.insert(handle);
  --aborting_;
  over_.NotifyAll();
}

bool ProcessCommunicators::Abort(SharedHandle& handle) const {
  const auto enter = [&handle] {
    return handle.gate.LockUntil("ncclCommAbort", core::Clock::now() + kCallLimit);
  };
  if (!enter()) {
    const CommHandle parent = handle.parent.exchange(nullptr);
    if (parent == nullptr) return false;
    handle.aborted = true;  // a call that was only slow is the last one
    static_cast<void>(api_->CommAbort(parent));
    if (!enter()) return false;
  }
  handle.aborted = true;
  const CommHandle comm = std::exchange(handle.comm, nullptr);
  const CommHandle parent = handle.parent.exchange(nullptr);
  handle.gate.Unlock();
  const auto abort = [this](CommHandle one) {
    if (one != nullptr) static_cast<void>(api_->CommAbort(one));
  };
  abort(comm);
  abort(parent);
  abort(std::exchange(handle.split, nullptr));  // NCCL does not write it any more
  return true;
}

}  // namespace sirtaki::ops::nccl
