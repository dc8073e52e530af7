// A communicator of NCCL. At first its calls do not block: each may answer that it is in progress, and
// is then polled until it is over, the deadline has passed, or somebody stops us. For each of them
// NCCL starts a thread, which takes five times as long as the call itself. Once the ranks are
// connected, a communicator may be made direct: from then on the calls are made by the caller's
// thread, and one that is stuck all the same is ended by ProcessCommunicators.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/base/status.h"
#include "core/base/types.h"
#include "ops/nccl/nccl_api.h"
#include "ops/nccl/process_communicators.h"

namespace sirtaki::ops::nccl {

// How long to wait for NCCL.
struct Patience {
  core::Duration limit = std::chrono::seconds(60);  // for one call: the option nccl_limit
  const std::atomic<bool>* stop = nullptr;          // set: wait no longer; null: nobody does
  std::atomic<const char*>* in = nullptr;           // told which call is waited for, or has failed
};

// What is chosen for a communicator, alike at all its ranks.
struct Choices {
  std::string name = {};   // for NCCL's output and profilers
  std::string ranks = {};  // "ranks 0-3", for texts
  int max_ctas = kUndefined;
  int cta_policy = kUndefined;
};

// Made, used and destroyed by one thread, whose current device is the communicator's. An abort by
// whatever thread makes all its calls fail. After an error, of whatever call, nothing but
// ProcessCommunicators::AbortAll and the destructor is of use.
class Communicator {
 public:
  // All `size` ranks with the same id, each as another rank. Errors: those of NCCL, kTimedOut if
  // the others do not come, kAborted by `stop`. `*made` is then null, or of use for AbortAlone only;
  // what is left is aborted with `all`.
  static core::Status Init(std::shared_ptr<ProcessCommunicators> all, const UniqueId& id, int size,
                           int rank, const Patience& patience, std::unique_ptr<Communicator>* made,
                           const Choices& choices = {});

  // The destructor waits for nothing. What was not finalized stays with `all`, to be aborted.
  ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int size() const { return size_; }
  int rank() const { return rank_; }
  const Api& api() const { return *all_->api(); }

  // One call, or several as a group of NCCL's, which starts them together: `calls` makes them and
  // gives the first result that is not good. When this returns ok, they are in their streams: only
  // then has an event that is recorded a meaning.
  core::Status Run(const char* function, const std::function<Result(CommHandle)>& call,
                   const Patience& patience);
  // RunTogether is Run for a call in which hosts wait for each other even where they are connected: the
  // limit holds for it in a direct communicator, too.
  core::Status RunTogether(const char* function, const std::function<Result(CommHandle)>& call,
                           const Patience& patience);
  core::Status RunGroup(const char* function, const std::function<Result(CommHandle)>& calls,
                        const Patience& patience);

  // The communicator becomes direct. Precondition: its ranks are connected. All of them call it
  // together. `device`: the caller's current one. Errors: those of Init.
  core::Status MakeDirect(std::shared_ptr<const cuda::Device> device, const Patience& patience);

  // What went wrong in what was started earlier: here, on the way, or at another rank.
  core::Status CheckAsync();

  // Says good-bye to the others and destroys it. Precondition: the streams are through with it.
  // Fails if it was aborted.
  core::Status Finalize(const Patience& patience);
  // Aborts it without the others of the process. Precondition: its stream has nothing else.
  void AbortAlone() { all_->AbortOne(handle_); }

 private:
  Communicator(std::shared_ptr<ProcessCommunicators> all, int size, int rank,
               const Choices& choices)
      : all_(std::move(all)),
        size_(size),
        rank_(rank),
        handle_(std::make_shared<SharedHandle>(choices.name)),
        config_(ConfigOf(choices, *handle_)),
        ranks_(choices.ranks) {}

  static Config ConfigOf(const Choices& choices, const SharedHandle& handle);
  // Calls, unless it was aborted or the caller is to stop. kInProgress is no error.
  core::Status Call(const char* function, const std::function<Result(CommHandle)>& call,
                    Result* result, const std::atomic<bool>* stop = nullptr);
  // Asks how the last call, of this function, has gone so far.
  core::Status Ask(const char* function, Result* result);
  // AwaitEnd waits until the last call is no longer in progress.
  core::Status AwaitEnd(const char* function, const Patience& patience);
  core::Status Late(const char* function, core::Duration limit) const;

  const std::shared_ptr<ProcessCommunicators> all_;
  const int size_;
  const int rank_;
  const std::shared_ptr<SharedHandle> handle_;
  Config config_;
  const std::string ranks_;
  std::shared_ptr<const cuda::Device> device_;  // of a direct one
};

}  // namespace sirtaki::ops::nccl
