#include "ops/nccl/communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "core/base/text.h"

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

class Entry {
 public:
  Entry(core::Gate& gate, const char* call) SIRTAKI_NO_THREAD_SAFETY_ANALYSIS : gate_(gate) {
    if (!gate_.TryLock(call)) gate_.LockUntil(call, core::TimePoint::max());
  }
  ~Entry() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS { gate_.Unlock(); }
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;

 private:
  core::Gate& gate_;
};

void WarnOfCtaPolicy(int policy, int version) {
  SIRTAKI_LOG(kWarning,
              "nccl_cta_policy=" << (policy == kCtaPolicyZero ? "zero" : "efficiency")
                                 << " (SIRTAKI_NCCL_CTA_POLICY) has no effect: it needs NCCL "
                                 << VersionText(FirstWithCtaPolicy(policy)) << " or later, and "
                                 << VersionText(version) << " is loaded");
}

}  // namespace

Status Communicator::Call(const char* function, const std::function<Result(CommHandle)>& call,
                          Result* result) {
  const Entry entry(handle_->gate, function);
  if (handle_->comm == nullptr) return {StatusCode::kAborted, "the communicator was aborted"};
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

Status Communicator::Await(const char* function, const Patience& patience) {
  if (patience.in != nullptr) patience.in->store(function, std::memory_order_relaxed);
  Status status = AwaitEnd(function, patience);
  // A look after a failure finds what it was in.
  if (status.ok() && patience.in != nullptr) patience.in->store(nullptr, std::memory_order_relaxed);
  return status;
}

Status Communicator::AwaitEnd(const char* function, const Patience& patience) {
  core::TimePoint last = core::Clock::now();
  core::Duration waited{};
  core::Duration pause = kFirstLook;
  for (;;) {
    if (patience.stop != nullptr && patience.stop->load(std::memory_order_relaxed)) {
      return {StatusCode::kAborted, std::string(function) + ": stopped while it was in progress"};
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
                          Choices choices) {
  constexpr const char* kFunction = "ncclCommInitRankConfig";
  Config config;
  config.max_ctas = choices.max_ctas;
  config.cta_policy = choices.cta_policy;
  std::unique_ptr<Communicator> communicator(
      new Communicator(std::move(all), size, rank, std::move(choices)));
  const Api& api = communicator->api();
  SharedHandle& handle = *communicator->handle_;
  int version = 0;
  Result result = api.GetVersion(&version);
  Status status = Check(api, result, "ncclGetVersion", nullptr);
  if (!status.ok()) return status;
  if (!handle.name.empty()) config.comm_name = handle.name.c_str();
  if (version < FirstWithCtaPolicy(config.cta_policy)) {
    if (rank == 0 && communicator->all_->IsFirstToWarn()) {
      WarnOfCtaPolicy(config.cta_policy, version);
    }
    config.cta_policy = kUndefined;
  }
  communicator->all_->Add(communicator->handle_);
  {
    const Entry entry(handle.gate, kFunction);
    if (handle.aborted) return {StatusCode::kAborted, "the communicator was aborted"};
    result = api.CommInitRankConfig(&handle.comm, size, id, rank, &config);
    status = Check(api, result, kFunction, handle.comm);
  }
  if (result == Result::kInProgress) status = communicator->Await(kFunction, patience);
  if (status.ok()) *made = std::move(communicator);
  return status;
}

Status Communicator::Run(const char* function, const std::function<Result(CommHandle)>& call,
                         const Patience& patience) {
  Result result = Result::kSuccess;
  Status status = Call(function, call, &result);
  return result == Result::kInProgress ? Await(function, patience) : status;
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
  Status status = Run("ncclCommFinalize", api().CommFinalize, patience);
  if (!status.ok()) return status;
  all_->Remove(handle_);
  const auto destroy = [this](CommHandle comm) {
    handle_->comm = nullptr;
    return api().CommDestroy(comm);
  };
  Result result = Result::kSuccess;
  return Call("ncclCommDestroy", destroy, &result);
}

}  // namespace sirtaki::ops::nccl
