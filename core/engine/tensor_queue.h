// Pending work of this rank, by key. Every accepted entry completes exactly once, whatever happens.
// Thread-safe. Any thread pushes; the holder of the engine's token takes and resolves.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/engine/work.h"

namespace sirtaki::core {

class TensorQueue {
 public:
  TensorQueue() = default;
  // Whatever is still pending completes with kShutDown.
  ~TensorQueue();
  TensorQueue(const TensorQueue&) = delete;
  TensorQueue& operator=(const TensorQueue&) = delete;

  // Accepts the work, or says why not and leaves it untouched:
  //   kDuplicateName    the name is in flight (until its handle is observed)
  //   the cause         the queue was closed
  //   kInvalidArgument  this rank has joined the set, or another thread, which is still there,
  //                     makes the set's unnamed calls: their order is what matches them
  // For unnamed work (Key::Form::kUnnamed) the queue gives the call's number, in order of
  // acceptance. Work whose name was released before its last use was resolved (the handle was
  // dropped early) is accepted, and held back until then: two uses of a key never negotiate at
  // once. Accepted work has a number; it, the key and the deadline do not change any more.
  Status Push(const WorkPtr& work) SIRTAKI_EXCLUDES(mutex_);

  // Work accepted, and not held back, since the last Take, in order. It stays pending until
  // Resolve.
  std::vector<WorkPtr> Take() SIRTAKI_EXCLUDES(mutex_);
  bool HasNew() const { return fresh_count_ > 0; }
  // Whether there is new work, or some that is held back and comes without a call.
  bool HasMore() const SIRTAKI_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return !fresh_.empty() || held_count_ > 0;
  }
  std::size_t NewCount() const { return fresh_count_; }

  // Removes and returns the pending work of a key; null if there is none. May make held work new.
  WorkPtr Resolve(const Key& key) SIRTAKI_EXCLUDES(mutex_);

  // The key of the pending work that has this handle and no time-out of its own; nothing if there is
  // none. The handle is compared only.
  std::optional<Key> KeyOf(const HandleState* handle) const SIRTAKI_EXCLUDES(mutex_);

  // The name of a key may be used again.
  void ReleaseName(const Key& key) SIRTAKI_EXCLUDES(mutex_);

  // Everyone has joined the set, or the join has failed: its unnamed calls count from 0 again.
  // Returns the work of this rank's join; null if there is none.
  WorkPtr EndEpoch(SetNumber set) SIRTAKI_EXCLUDES(mutex_);

  // An account says what a rank's calls have come to.
  struct Account {
    struct Call {
      Key key;
      Asked asked;
      std::uint64_t number = 0;  // Work::number
      TimePoint submitted{};
    };
    std::vector<Call> pending;  // by set and number; once the queue is closed: as it was then
    std::map<SetNumber, std::uint64_t> calls;  // accepted, by set
    std::set<SetNumber> joined;
  };
  Account GiveAccount() const SIRTAKI_EXCLUDES(mutex_);

  // Completes everything pending with `why` (not ok) and refuses what comes. The first cause stays.
  void Close(const Status& why) SIRTAKI_EXCLUDES(mutex_);
  bool closed() const SIRTAKI_EXCLUDES(mutex_);

  std::size_t pending() const SIRTAKI_EXCLUDES(mutex_);  // accepted and not resolved
  // Somebody else watches the deadline of this work from now on.
  void HandOverDeadline(const Work& work) SIRTAKI_EXCLUDES(mutex_);
  // EarliestDeadline is that of the pending calls whose deadline was not handed over;
  // TimePoint::max() if none has one.
  // `key`, unless null, is set to that call's, `limit` to the time that it was given.
  TimePoint EarliestDeadline(Key* key, Duration* limit = nullptr) const SIRTAKI_EXCLUDES(mutex_);

 private:
  static Status CheckUnnamed(SetNumber set, std::weak_ptr<const void>& thread);
  void Admit(const WorkPtr& work, WorkPtr* pending) SIRTAKI_REQUIRES(mutex_);
  std::vector<Account::Call> PendingCalls() const SIRTAKI_REQUIRES(mutex_);
  void DropUnused() SIRTAKI_REQUIRES(mutex_);
  void ForgetDeadline(const Work& work) SIRTAKI_REQUIRES(mutex_);

  // No WorkPtr is dropped under it: the last one may call ReleaseName through its handle.
  mutable Mutex mutex_;
  std::vector<WorkPtr> fresh_ SIRTAKI_GUARDED_BY(mutex_);
  std::atomic<std::size_t> fresh_count_{0};  // for those who look without the mutex
  // A key is used while its work is pending, and while its name is in flight. Uses that are over
  // stay for the next one of the same key, as long as they are few.
  struct Use {
    WorkPtr pending;  // null: there is none
    bool named = false;
    std::vector<WorkPtr> held;  // until what is pending is resolved, in this order
  };
  using Uses = std::unordered_map<Key, Use, KeyHash>;
  static constexpr std::size_t kFewestKept = 1024;
  Uses uses_ SIRTAKI_GUARDED_BY(mutex_);
  std::size_t most_uses_ SIRTAKI_GUARDED_BY(mutex_) = kFewestKept;  // those that are over go then
  std::size_t pending_count_ SIRTAKI_GUARDED_BY(mutex_) = 0;
  std::size_t held_count_ SIRTAKI_GUARDED_BY(mutex_) = 0;
  // A set's calls are counted, and those without a name numbered in epochs.
  struct Epoch {
    std::uint64_t next = 0;
    std::weak_ptr<const void> thread;  // who makes them; gone: anybody may
    bool joined = false;
  };
  struct SetCalls {
    std::uint64_t accepted = 0;  // not messages
    Epoch epoch;
  };
  std::map<SetNumber, SetCalls> of_set_ SIRTAKI_GUARDED_BY(mutex_);
  // The deadlines are those of pending and held work.
  std::set<std::pair<TimePoint, const Work*>> deadlines_ SIRTAKI_GUARDED_BY(mutex_);
  Status closed_ SIRTAKI_GUARDED_BY(mutex_);
  std::vector<Account::Call> pending_at_close_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::core
