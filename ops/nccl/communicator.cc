#include "ops/nccl/communicator.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "core/base/text.h"
#include "core/threads/quiet_thread.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;
using core::StatusCode;

// NCCL starts a thread for each call, which is over in some tens of microseconds: the lane looks
// without a sleep for longer than that, as the shortest sleep is as long again.
constexpr auto kAwake = std::chrono::microseconds(300);
// The wait between looks grows from here.
constexpr auto kFirstLook = std::chrono::microseconds(50);
constexpr auto kLongestLook = std::chrono::microseconds(500);
// A process that was stopped counts that much of it as waiting for NCCL.
constexpr auto kMostOfALook = std::chrono::seconds(1);

void WarnOfCtaPolicy(int policy, int version) {
  SIRTAKI_LOG(kWarning,
              "nccl_cta_policy=" << (policy == kCtaPolicyZero ? "zero" : "efficiency")
                                 << " (SIRTAKI_NCCL_CTA_POLICY) has no effect: it needs NCCL "
                                 << VersionText(FirstWithCtaPolicy(policy)) << " or later, and "
                                 << VersionText(version) << " is loaded");
}

Status Stopped(const char* function) {
  return {StatusCode::kAborted, std::string(function) + ": the caller was stopped"};
}

}  // namespace

Config Communicator::ConfigOf(const Choices& choices, const SharedHandle& handle) {
  Config config;
  config.split_share = 1;
  config.max_ctas = choices.max_ctas;
  config.cta_policy = choices.cta_policy;
  if (!handle.name.empty()) config.comm_name = handle.name.c_str();
  return config;
}

Status Communicator::Call(const char* function, const std::function<Result(CommHandle)>& call,
                          Result* result, const std::atomic<bool>* stop) {
  const core::GateLock entry(handle_->gate, function, core::TimePoint::max());
  if (handle_->aborted) return {StatusCode::kAborted, "the communicator was aborted"};
  // A caller is told to stop before somebody looks whether it is behind the gate: one of the two sees
  // the other.
  if (stop != nullptr && *stop) return Stopped(function);
  *result = call(handle_->comm);
  return Check(api(), *result, function, handle_->comm);
}

Status Communicator::Ask(const char* function, Result* result) {
  Status found;
  Result asked = Result::kSuccess;
  const auto ask = [&](CommHandle comm) {
    const Result answer = api().CommGetAsyncError(comm, result);
    if (answer == Result::kSuccess) found = Check(api(), *result, function, comm);
    return answer;
  };
  Status status = Call("ncclCommGetAsyncError", ask, &asked);
  return status.ok() ? found : status;
}

Status Communicator::AwaitEnd(const char* function, const Patience& patience) {
  core::TimePoint last = core::Clock::now();
  core::Duration waited{};
  core::Duration pause = kFirstLook;
  for (;;) {
    if (patience.stop != nullptr && patience.stop->load(std::memory_order_relaxed)) {
      return Stopped(function);
    }
    Result result = Result::kInProgress;
    Status status = Ask(function, &result);
    if (!status.ok() || result != Result::kInProgress) return status;
    const core::TimePoint now = core::Clock::now();
    waited += std::min<core::Duration>(now - std::exchange(last, now), kMostOfALook);
    if (waited >= patience.limit) return Late(function, patience.limit);
    if (waited < kAwake) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min<core::Duration>(2 * pause, kLongestLook);
  }
}

Status Communicator::Late(const char* function, core::Duration limit) const {
  const std::string ranks = ranks_.empty() ? "its ranks" : ranks_;
  return {StatusCode::kTimedOut,
          std::string(function) + ": still in progress after " + core::DurationText(limit) +
              ", which is nccl_limit: not all of " + ranks +
              " have come to it, or they do not reach each other. Those that have come say \"in " +
              function +
              "\" in the warnings of stall_warning and in what sirtakirun --explain tells. If all "
              "have, look at the network with NCCL_DEBUG=INFO and choose it by "
              "NCCL_SOCKET_IFNAME; if some are only late, raise nccl_limit (SIRTAKI_NCCL_LIMIT)"};
}

Status Communicator::Init(std::shared_ptr<ProcessCommunicators> all, const UniqueId& id, int size,
                          int rank, const Patience& patience, std::unique_ptr<Communicator>* made,
                          const Choices& choices) {
  std::unique_ptr<Communicator> communicator(new Communicator(std::move(all), size, rank, choices));
  const Api& api = communicator->api();
  SharedHandle& handle = *communicator->handle_;
  Config& config = communicator->config_;
  int version = 0;
  Result result = api.GetVersion(&version);
  Status status = Check(api, result, "ncclGetVersion", nullptr);
  if (!status.ok()) return status;
  if (version < FirstWithCtaPolicy(config.cta_policy)) {
    if (rank == 0 && communicator->all_->IsFirstToWarn()) {
      WarnOfCtaPolicy(config.cta_policy, version);
    }
    config.cta_policy = kUndefined;
  }
  communicator->all_->Add(communicator->handle_);
  const auto init = [&](CommHandle) {
    return api.CommInitRankConfig(&handle.comm, size, id, rank, &config);
  };
  status = communicator->Run("ncclCommInitRankConfig", init, patience);
  *made = std::move(communicator);
  return status;
}

Status Communicator::MakeDirect(std::shared_ptr<const cuda::Device> device,
                                const Patience& patience) {
  // Both share their connections, and what tells them to abort.
  Config config = config_;
  config.blocking = 1;
  CommHandle& made = handle_->split;
  Status status = Run(
      "ncclCommSplit",
      [&](CommHandle comm) { return api().CommSplit(comm, 0, rank_, &made, &config); }, patience);
  if (!status.ok()) return status;
  const core::GateLock entry(handle_->gate, "ncclCommSplit", core::TimePoint::max());
  if (handle_->aborted) return {StatusCode::kAborted, "the communicator was aborted"};
  handle_->parent = std::exchange(handle_->comm, std::exchange(made, nullptr));
  device_ = std::move(device);
  return Status::Ok();
}

Status Communicator::Run(const char* function, const std::function<Result(CommHandle)>& call,
                         const Patience& patience) {
  if (patience.in != nullptr) patience.in->store(function, std::memory_order_relaxed);
  Result result = Result::kSuccess;
  Status status = Call(function, call, &result, patience.stop);
  // The result does not tell whether the call is over: ncclCommWindowRegister of NCCL 2.28 gives
  // ncclSuccess while it is in progress.
  if (status.ok()) status = AwaitEnd(function, patience);
  // A look after a failure finds what it was in.
  if (status.ok() && patience.in != nullptr) patience.in->store(nullptr, std::memory_order_relaxed);
  return status;
}

Status Communicator::RunTogether(const char* function,
                                 const std::function<Result(CommHandle)>& call,
                                 const Patience& patience) {
  if (device_ == nullptr) return Run(function, call, patience);
  core::Mutex mutex;
  core::CondVar changed;
  bool is_over = false;
  bool is_late = false;
  const auto watch_it = [&] {
    core::MutexLock lock(mutex);
    core::TimePoint last = core::Clock::now();
    core::Duration waited{};
    while (!is_over && waited < patience.limit) {
      const auto look = std::min<core::Duration>(patience.limit - waited, kMostOfALook);
      changed.WaitUntil(mutex, last + look);
      const core::TimePoint now = core::Clock::now();
      waited += std::min<core::Duration>(now - std::exchange(last, now), kMostOfALook);
    }
    if (is_over) return;
    is_late = true;
    // The call may not even end by an abort.
    SIRTAKI_LOG(kWarning, Late(function, patience.limit).message());
    all_->StartAbortAll(device_);
  };
  std::thread watch;
  try {
    watch = core::StartQuietThread(watch_it);
  } catch (const std::system_error&) {
    return core::StatusOfException();
  }
  Status status;
  {
    const auto end = [&](const void*) {
      {
        core::MutexLock lock(mutex);
        is_over = true;
        changed.NotifyAll();
      }
      watch.join();
    };
    const std::unique_ptr<const void, decltype(end)> at_the_end(this, end);
    status = Run(function, call, patience);
  }
  return is_late ? Late(function, patience.limit) : status;
}

Status Communicator::RunGroup(const char* function, const std::function<Result(CommHandle)>& calls,
                              const Patience& patience) {
  const auto group = [&](CommHandle comm) {
    const Result started = api().GroupStart();
    if (started != Result::kSuccess) return started;
    const Result result = calls(comm);
    // A group that was opened is closed, whatever happened in it: it is the thread's.
    const Result ended = api().GroupEnd();
    return result == Result::kSuccess || result == Result::kInProgress ? ended : result;
  };
  return Run(function, group, patience);
}

Status Communicator::CheckAsync() {
  Result result = Result::kSuccess;
  return Ask("NCCL, during an operation", &result);
}

Status Communicator::Finalize(const Patience& patience) {
  for (bool is_last = false; !is_last;) {
    Status status = RunTogether("ncclCommFinalize", api().CommFinalize, patience);
    if (!status.ok()) return status;
    is_last = handle_->parent == nullptr;
    if (is_last) all_->Remove(handle_);
    const auto destroy = [this](CommHandle comm) {
      handle_->comm = handle_->parent.exchange(nullptr);
      return api().CommDestroy(comm);
    };
    Result result = Result::kSuccess;
    status = Call("ncclCommDestroy", destroy, &result);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace sirtaki::ops::nccl
