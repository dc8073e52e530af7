#include "ops/nccl/communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "core/base/text.h"

namespace sirtaki::ops::nccl {
namespace {

using core::Status;
using core::StatusCode;

// Most calls are over in a few microseconds, and the shortest sleep takes about fifty: until then
// the thread looks without one.
constexpr auto kAwake = std::chrono::microseconds(50);
// The wait between looks grows from here.
constexpr auto kFirstLook = std::chrono::microseconds(50);
constexpr auto kLongestLook = std::chrono::microseconds(500);

}  // namespace

Status Communicator::Await(Result result, const char* function, const Patience& patience) {
  const core::TimePoint begun = core::Clock::now();
  core::Duration pause = kFirstLook;
  while (result == Result::kInProgress) {
    if (patience.stop != nullptr && patience.stop->load(std::memory_order_relaxed)) {
      return {StatusCode::kAborted, std::string(function) + ": stopped while it was in progress"};
    }
    const Result asked = api_.CommGetAsyncError(handle_, &result);
    if (asked != Result::kSuccess) return Check(api_, asked, "ncclCommGetAsyncError", handle_);
    if (result != Result::kInProgress) break;
    const core::Duration waited = core::Clock::now() - begun;
    if (waited >= patience.limit) {
      return {StatusCode::kTimedOut, std::string(function) + ": still in progress after " +
                                         core::DurationText(patience.limit)};
    }
    if (waited < kAwake) continue;
    std::this_thread::sleep_for(pause);
    pause = std::min<core::Duration>(2 * pause, kLongestLook);
  }
  return Check(api_, result, function, handle_);
}

Status Communicator::Init(const Api& api, const UniqueId& id, int size, int rank,
                          const Patience& patience, std::unique_ptr<Communicator>* made) {
  std::unique_ptr<Communicator> communicator(new Communicator(api, size, rank));
  Config config;
  const Result result = api.CommInitRankConfig(&communicator->handle_, size, id, rank, &config);
  Status status = communicator->Await(result, "ncclCommInitRankConfig", patience);
  if (status.ok()) *made = std::move(communicator);
  return status;
}

Communicator::~Communicator() { Abort(); }

Status Communicator::Run(const char* function, const std::function<Result(CommHandle)>& call,
                         const Patience& patience) {
  return Await(call(handle_), function, patience);
}

Status Communicator::RunGroup(const char* function, const std::function<Result(CommHandle)>& calls,
                              const Patience& patience) {
  const Result started = api_.GroupStart();
  if (started != Result::kSuccess) return Check(api_, started, "ncclGroupStart", handle_);
  const Result result = calls(handle_);
  // A group that was opened is closed, whatever happened in it: it is the thread's.
  const Result ended = api_.GroupEnd();
  Status status = Check(api_, result, function, handle_);
  if (!status.ok()) return status;
  return Await(ended, function, patience);
}

Status Communicator::CheckAsync() {
  if (handle_ == nullptr) return {StatusCode::kAborted, "the communicator was aborted"};
  Result error = Result::kSuccess;
  const Result asked = api_.CommGetAsyncError(handle_, &error);
  if (asked != Result::kSuccess) return Check(api_, asked, "ncclCommGetAsyncError", handle_);
  return Check(api_, error, "NCCL, during an operation", handle_);
}

void Communicator::Abort() {
  if (handle_ != nullptr) static_cast<void>(api_.CommAbort(std::exchange(handle_, nullptr)));
}

Status Communicator::Finalize(const Patience& patience) {
  if (handle_ == nullptr) return Status::Ok();
  Status status = Run("ncclCommFinalize", api_.CommFinalize, patience);
  if (!status.ok()) {
    Abort();
    return status;
  }
  CommHandle handle = std::exchange(handle_, nullptr);
  return Check(api_, api_.CommDestroy(handle), "ncclCommDestroy", nullptr);
}

}  // namespace sirtaki::ops::nccl
