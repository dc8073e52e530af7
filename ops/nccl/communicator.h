// A communicator of NCCL, never blocking: each call may answer that it is in progress, and is then
// polled until it is over, the deadline has passed, or somebody stops us.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/base/types.h"
#include "ops/nccl/nccl_api.h"

namespace sirtaki::ops::nccl {

// How long to wait for NCCL.
struct Patience {
  core::Duration limit = std::chrono::seconds(60);  // for one call
  const std::atomic<bool>* stop = nullptr;          // set: wait no longer; null: nobody does
};

// Made, used and destroyed by one thread, whose current device is the communicator's. After an
// error, of whatever call, nothing but Abort and the destructor is of use.
class Communicator {
 public:
  // All `size` ranks with the same id, each as another rank. Errors: those of NCCL, kTimedOut if
  // the others do not come, kAborted by `stop`. Then nothing is left of it.
  static core::Status Init(const Api& api, const UniqueId& id, int size, int rank,
                           const Patience& patience, std::unique_ptr<Communicator>* made);

  // Aborts what is under way; neither waits for the device nor for other ranks. A program that has
  // ended well calls Finalize first.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int size() const { return size_; }
  int rank() const { return rank_; }
  CommHandle handle() const { return handle_; }
  const Api& api() const { return api_; }

  // One call, or several as a group of NCCL's, which starts them together: `calls` makes them and
  // gives the first result that is not good. When this returns ok, they are in their streams: only
  // then has an event that is recorded a meaning.
  core::Status Run(const char* function, const std::function<Result(CommHandle)>& call,
                   const Patience& patience);
  core::Status RunGroup(const char* function, const std::function<Result(CommHandle)>& calls,
                        const Patience& patience);

  // What went wrong in what was started earlier: here, on the way, or at another rank.
  core::Status CheckAsync();

  // Ends what is in its streams. Once; later calls do nothing.
  void Abort();

  // Says good-bye to the others and destroys it. Precondition: the streams are through with it.
  core::Status Finalize(const Patience& patience);

 private:
  Communicator(const Api& api, int size, int rank) : api_(api), size_(size), rank_(rank) {}

  // Await waits until the last call is no longer in progress.
  core::Status Await(Result result, const char* function, const Patience& patience);

  const Api& api_;
  const int size_;
  const int rank_;
  CommHandle handle_ = nullptr;
};

}  // namespace sirtaki::ops::nccl
