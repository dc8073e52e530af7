// One planned group on its way: a small machine that starts the group's operations one after the
// other and packs and unpacks between them. It never waits by itself: on a lane whose operations
// block inside the call it runs through, on a polled lane it advances as far as it can each time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/executor.h"
#include "fusion/pack.h"
#include "ops/backend.h"
#include "ops/staging.h"

namespace sirtaki::ops {

// A group as it was planned. Shared by who runs it and who reports or fails it; never changed.
struct GroupTask {
  Channel channel;
  core::RankRanges members;
  int rank = 0;                      // this one
  std::vector<core::RunItem> items;  // not empty; one kind, dtype, wire type, root and scale
  core::TimePoint since{};

  const core::Signature& signature() const { return *items.front().signature; }
  // `all-reduce of 12 tensors from "layer1.weight" (large lane)`
  std::string ToString() const;
};
using GroupTaskPtr = std::shared_ptr<const GroupTask>;

enum class Progress : std::uint8_t {
  kWaiting,  // an operation is under way; nothing changed
  kMoved,    // one finished and the next is under way
  kOver,     // the outputs are written, or status() says what failed
};

// Not thread-safe. `backend`, `staging` and `stop` must outlive it.
class GroupRun {
 public:
  virtual ~GroupRun() = default;
  GroupRun(const GroupRun&) = delete;
  GroupRun& operator=(const GroupRun&) = delete;

  // Once `stop` is true, no further operation is started and the run is over with kAborted.
  // Throws nothing: exceptions of allocate_output and of memory become the status.
  Progress Advance();

  // Precondition: over.
  const core::Status& status() const { return status_; }
  const GroupTaskPtr& task() const { return task_; }

  static std::unique_ptr<GroupRun> Make(const GroupTaskPtr& task, Backend& backend,
                                        Staging& staging, const fusion::Cutting& cutting,
                                        const std::atomic<bool>& stop);

 protected:
  GroupRun(GroupTaskPtr task, Backend& backend, Staging& staging, const std::atomic<bool>& stop);

  // The last operation has finished (or none has been started yet): takes its result and begins the
  // next. False if none is left, or Fail was called.
  virtual bool Next() = 0;

  void Begin(std::unique_ptr<Completion> operation) { operation_ = std::move(operation); }
  bool Fail(core::StatusCode code, std::string text);  // false

  Backend& backend_;
  Staging& staging_;

 private:
  bool NextOrThrown();

  const GroupTaskPtr task_;
  const std::atomic<bool>& stop_;
  std::unique_ptr<Completion> operation_;
  core::Status status_;
  bool over_ = false;
};

}  // namespace sirtaki::ops
