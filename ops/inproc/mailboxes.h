// The messages of the in-process world. A message is not stored: it moves when both the send and
// its receive are there, so a send is under way until then, as one of a large message is over a
// network.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <tuple>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "ops/base/backend.h"

namespace sirtaki::ops {

// Thread-safe.
class Mailboxes {
 public:
  // Both keep a reference to `mailboxes`. The ranks are not checked.
  static std::unique_ptr<Completion> Send(const std::shared_ptr<Mailboxes>& mailboxes, int from,
                                          int to, int tag, const void* memory, std::int64_t bytes);
  static std::unique_ptr<Completion> Receive(const std::shared_ptr<Mailboxes>& mailboxes, int from,
                                             int to, int tag, void* memory, std::int64_t bytes);

  // Ends what waits and whatever comes later with `why`, which is not ok; the first reason stays.
  void Abort(const core::Status& why) SIRTAKI_EXCLUDES(mutex_);

 private:
  using Address = std::tuple<int, int, int>;  // from, to, tag

  // One side of a message that waits for the other, or waited. Guarded by the mailboxes' mutex.
  struct Side {
    Address address;
    const void* given = nullptr;  // of a send
    void* taken = nullptr;        // of a receive
    std::int64_t bytes = 0;
    bool done = false;
    core::Status status;

    void Finish(core::Status how) {
      done = true;
      status = std::move(how);
    }
  };
  using SidePtr = std::shared_ptr<Side>;
  class Pending;
  // Sends or receives, never both, in the order of the calls.
  struct Box {
    bool sends = false;
    std::deque<SidePtr> waiting;
  };

  static std::unique_ptr<Completion> Post(const std::shared_ptr<Mailboxes>& mailboxes, SidePtr side,
                                          bool sends);
  void Match(const SidePtr& side, bool sends) SIRTAKI_EXCLUDES(mutex_);
  void Withdraw(const SidePtr& side) SIRTAKI_EXCLUDES(mutex_);

  core::Mutex mutex_;
  core::Status aborted_ SIRTAKI_GUARDED_BY(mutex_);
  std::map<Address, Box> boxes_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::ops
