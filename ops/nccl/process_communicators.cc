#include "ops/nccl/process_communicators.h"

#include <thread>
#include <vector>

#include "core/threads/quiet_thread.h"

namespace sirtaki::ops::nccl {
namespace {

// A call of a communicator that does not block is over in far less.
constexpr auto kCallLimit = std::chrono::milliseconds(100);
// The first version of NCCL that aborts several communicators in a group.
constexpr int kAbortsInGroups = 22200;

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
  if (!all_.empty()) {
    until_ = core::Clock::now() + kAbortGrace;
    core::StartQuietThread([self = shared_from_this(), device = std::move(device), all = all_] {
      self->Abort(*device, all);
      core::MutexLock ended(self->mutex_);
      --self->aborting_;
      self->over_.NotifyAll();
    }).detach();
    ++aborting_;
    all_.clear();
  }
  while (aborting_ > 0 && over_.WaitUntil(mutex_, until_)) {
  }
}

void ProcessCommunicators::Abort(const cuda::Device& device, const Handles& handles) const {
  std::vector<CommHandle> comms;
  for (const std::shared_ptr<SharedHandle>& handle : handles) {
    if (!handle->gate.LockUntil("ncclCommAbort", core::Clock::now() + kCallLimit)) continue;
    if (handle->comm != nullptr) comms.push_back(std::exchange(handle->comm, nullptr));
    handle->gate.Unlock();
  }
  if (comms.empty()) return;
  // NCCL leaves a thread with the device that it had; with none, it would make a context on the first.
  const auto abort_one = [&](CommHandle comm) {
    static_cast<void>(device.Adopt());
    static_cast<void>(api_->CommAbort(comm));
  };
  int version = 0;
  if (api_->GetVersion(&version) == Result::kSuccess && version >= kAbortsInGroups) {
    static_cast<void>(api_->GroupStart());
    for (CommHandle comm : comms) abort_one(comm);
    static_cast<void>(api_->GroupEnd());
    return;
  }
  // One after the other, in whatever order, each could wait for the kernel of another one.
  std::vector<std::thread> threads;
  threads.reserve(comms.size());
  for (CommHandle comm : comms) threads.emplace_back(abort_one, comm);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace sirtaki::ops::nccl
