// One submitted collective on this rank, and the handle through which its submitter learns the end
// of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "core/protocol/request.h"

namespace sirtaki::core {

// A watcher is told of a handle's end. Thread-safe.
class HandleWatcher {
 public:
  virtual ~HandleWatcher() = default;
  // Completed runs on the completing thread, after the state is visible, if somebody waits; it only
  // rings a doorbell.
  virtual void Completed() = 0;
  // Observed runs once, when the submitter has seen the end (synchronized, polled true, or destroyed
  // the handle): the name is free again.
  virtual void Observed(const Key& key) = 0;
};

// The shared state of a handle. Completed exactly once: the first Complete wins, later ones are
// no-ops (a fault completes handles at once, a data thread that returns later finds them done).
// Thread-safe. Lock order: token -> queue -> handle.
class HandleState {
 public:
  // `watcher`: null: nobody is told. `key`: of the work, for texts.
  explicit HandleState(std::shared_ptr<HandleWatcher> watcher = nullptr,
                       Key key = Key::Unnamed(kWorldSet, 0));
  ~HandleState();
  HandleState(const HandleState&) = delete;
  HandleState& operator=(const HandleState&) = delete;

  bool Complete(Status status);  // false if it was complete already
  // Calls `next` when the handle is complete: on the completing thread, perhaps under locks of the
  // engine or a lane, so that it only hands on; at once, if it is complete already.
  void Then(std::function<void()> next);
  bool done() const { return done_.load(std::memory_order_acquire); }
  const Key& key() const { return key_; }  // the number of an unnamed one is not known
  // Precondition: done().
  const Status& status() const { return status_; }
  // The status, or kTimedOut while the handle is not done: what a wait gives that has ended.
  Status AfterWait() const;

  // joined() is a member that had joined, and so took part with zeros or nothing; -1: none had. By the
  // completer, before Complete; one that comes too late may still set it.
  void SetJoined(int rank) { joined_.store(rank, std::memory_order_relaxed); }
  int joined() const { return joined_.load(std::memory_order_relaxed); }

  // The value is what the end brings beside its status: the last rank of a join, the number of a
  // set. By the completer, before Complete.
  void SetValue(std::int64_t value) { value_.store(value, std::memory_order_relaxed); }
  std::int64_t value() const { return value_.load(std::memory_order_relaxed); }

  // The parts of a grouped call that no rank has, or whether none has the tensor that is all. By the
  // completer, before Complete. A completer that comes too late may still set them, so they are read
  // only where the status is ok.
  void SetAbsentParts(std::vector<bool> absent) { absent_parts_ = std::move(absent); }
  // Whether no rank had this part: the result is meaningless then. Precondition: done().
  bool PartIsAbsent(std::size_t part) const {
    return status_.ok() && part < absent_parts_.size() && absent_parts_[part];
  }

  // Work is moved in one piece and as many as are added to it before that one has ended.
  // The handle completes when all have ended well, or when the first of them fails.
  void AddPiece() { pieces_.fetch_add(1, std::memory_order_relaxed); }
  void EndPiece(const Status& status);

  // Idempotent. The destructor does it too, so that no name stays taken; hence the last HandlePtr
  // must not be dropped while holding a lock that Observed takes.
  void Observe();
  // Completes the handle of a submission that was refused: it never held its name, so observing it
  // frees nothing.
  void Refuse(const Status& why) {
    observed_.store(true, std::memory_order_release);
    Complete(why);
  }

  // Brackets a wait, so that Complete rings only if somebody listens.
  void BeginWait() { waiters_.fetch_add(1, std::memory_order_seq_cst); }
  void EndWait() { waiters_.fetch_sub(1, std::memory_order_seq_cst); }

 private:
  const std::shared_ptr<HandleWatcher> watcher_;
  const Key key_;
  Mutex mutex_;                              // serialises completers
  Status status_;                            // written once, before done_
  std::vector<std::function<void()>> next_;  // empty once it is done
  std::atomic<int> joined_{-1};
  std::atomic<std::int64_t> value_{-1};
  std::vector<bool> absent_parts_;
  std::atomic<std::size_t> pieces_{1};  // that have not ended
  std::atomic<bool> done_{false};
  std::atomic<bool> observed_{false};
  std::atomic<int> waiters_{0};
};

using HandlePtr = std::shared_ptr<HandleState>;

// The first element of each member's part of a tensor, and the end of the last one.
using PartCuts = std::shared_ptr<const std::vector<std::int64_t>>;

// The part of an all-reduce's result that is all of it that a rank needs. Whoever reduces may bring it
// to `memory` and leave the output as it is, or write the output as if nothing were kept.
struct KeptPart {
  std::int64_t begin = 0;  // bytes of the output
  std::int64_t bytes = 0;
  void* memory = nullptr;
  // Where all members keep a part, which follows from the signature, nobody needs the whole output.
  // Null: some may need it.
  PartCuts cuts;
  bool is_there = false;  // set by whoever has brought it there
};

struct Work;
using WorkPtr = std::shared_ptr<Work>;

// Host memory of one collective. Kept alive by the Work until the last thread that may touch it is
// done, which after a fault may be never.
struct Work {
  virtual ~Work() = default;  // ops/cuda/device_work asks which kind it is

  Request request;
  // request.signature()->ElementCount() elements; where the first dimension may differ by rank: times
  // `rows`.
  const void* input = nullptr;
  // All-reduce, broadcast, reduce (at the root): the size of the input; may equal it (in place).
  // All-gather of equal shapes: as many of them as the set has members. Reduce-scatter: this
  // rank's rows. Receive: the size of the signature's shape.
  void* output = nullptr;
  std::optional<KeptPart> kept;  // of an all-reduce; no value: this rank needs the whole output
  std::int64_t rows = 0;         // this rank's first dimension, where that may differ by rank
  // All-to-all, and scatter at its root: the rows for each member, `rows` together. Empty: equal
  // parts (all-to-all: `rows` is a multiple of the set's size; scatter: the remainder goes to the
  // first members, as in RowsOf).
  std::vector<std::int64_t> splits;
  // Where the first dimension may differ by rank: called once, on the lane's thread, when the rows
  // that come from each member (ascending by rank) are known; not at all where nothing arrives by
  // definition (gather, but at the root). Returns the output's memory (may be null if the result is
  // empty). May throw std::bad_alloc or LibTorch's error; the lane turns that into the group's
  // fault.
  std::function<void*(const std::vector<std::int64_t>& rows)> allocate_output;
  // The parts of a grouped call are the memory of each of the signature's parts, without key and
  // handle.
  std::vector<WorkPtr> parts;
  // Send and receive: the other rank, of the world, and what tells its messages apart.
  int peer = -1;
  int tag = 0;
  TimePoint deadline = TimePoint::max();  // of the call; passing it is the group's fault
  TimePoint submitted{};
  std::uint64_t number = 0;  // the n-th call of its set on this rank; 0 for messages
  HandlePtr handle;
  std::shared_ptr<void> keep_alive;  // what a bucket, a message or a rendezvous needs

  // Sends and receives are not negotiated.
  bool is_message() const {
    const SignaturePtr& signature = request.signature();
    return signature != nullptr &&
           (signature->kind == OpKind::kSend || signature->kind == OpKind::kReceive);
  }
  // Counts what this rank gives to it.
  std::int64_t InputBytes() const;
};
// InputBytesOf a part is what `signature` says of it.
std::int64_t InputBytesOf(const Signature& signature, const Work& work);

// The rows of member `index` if `rows` are dealt out to `members`: the remainder goes to the first
// ones.
std::int64_t RowsOf(std::int64_t rows, std::int64_t members, std::int64_t index);
// Where they begin.
std::int64_t FirstRowOf(std::int64_t rows, std::int64_t members, std::int64_t index);

}  // namespace sirtaki::core
