#include "core/engine/tensor_queue.h"

#include <algorithm>
#include <new>
#include <tuple>
#include <utility>

#include "core/base/check.h"
#include "core/protocol/message.h"
#include "core/threads/callers.h"

namespace sirtaki::core {
namespace {

std::string OfSet(SetNumber set) {
  return set == kWorldSet ? std::string() : " in process set " + std::to_string(set);
}

}  // namespace

TensorQueue::~TensorQueue() {
  Close(Status(StatusCode::kShutDown, "Sirtaki was shut down before this call was done"));
}

Status TensorQueue::Push(const WorkPtr& work) {
  Key& key = work->request.key;
  MutexLock lock(mutex_);
  if (!closed_.ok()) return closed_;
  SetCalls& of_set = of_set_[key.set];
  Epoch& epoch = of_set.epoch;
  if (epoch.joined) {
    return {StatusCode::kInvalidArgument,
            "this rank has joined" + OfSet(key.set) +
                ": it can call nothing more there until its join has returned"};
  }
  const bool is_unnamed = key.form == Key::Form::kUnnamed;
  if (key.is_join()) {
    epoch.joined = true;
  } else if (is_unnamed) {
    if (Status status = CheckUnnamed(key.set, epoch.thread); !status.ok()) return status;
    std::uint64_t call = epoch.next;
    // Numbers restart when a set's epoch has ended, and what came before is resolved by then; but a
    // set that is removed may still have a call here that the negotiation has not seen.
    const auto is_pending = [&] {
      const auto use = uses_.find(Key::Unnamed(key.set, call));
      return use != uses_.end() && use->second.pending != nullptr;
    };
    while (is_pending()) ++call;
    epoch.next = call + 1;
    key.number = call;
  }
  if (uses_.size() >= most_uses_) DropUnused();
  Use& use = uses_[key];
  if (use.named) {
    return {StatusCode::kDuplicateName,
            key.ToString() +
                " is already in flight on this rank: wait for its handle before using it again, or "
                "give each call a name of its own",
            Origin{-1, {}, TensorName(key)}};
  }
  use.named = !is_unnamed;
  if (!work->is_message()) work->number = ++of_set.accepted;
  if (work->deadline != TimePoint::max()) deadlines_.emplace(work->deadline, work.get());
  if (use.pending == nullptr) {
    Admit(work, &use.pending);
  } else {
    use.held.push_back(work);
    ++held_count_;
  }
  return Status::Ok();
}

Status TensorQueue::CheckUnnamed(SetNumber set, std::weak_ptr<const void>& thread) {
  const std::shared_ptr<const void> known = thread.lock();
  if (known != nullptr && known != ThisThread()) {
    return {StatusCode::kInvalidArgument,
            "a second thread made a call without a name" + OfSet(set) +
                ": such calls are matched by their order, so one thread has to make them all; give "
                "this one a name"};
  }
  thread = ThisThread();
  return Status::Ok();
}

void TensorQueue::Admit(const WorkPtr& work, WorkPtr* pending) {
  *pending = work;
  ++pending_count_;
  fresh_.push_back(work);
  fresh_count_ = fresh_.size();
}

std::vector<WorkPtr> TensorQueue::Take() {
  std::vector<WorkPtr> taken;
  MutexLock lock(mutex_);
  taken.swap(fresh_);
  fresh_count_ = 0;
  return taken;
}

WorkPtr TensorQueue::Resolve(const Key& key) {
  WorkPtr resolved;
  MutexLock lock(mutex_);
  const auto found = uses_.find(key);
  if (found == uses_.end() || found->second.pending == nullptr) return nullptr;
  resolved = std::exchange(found->second.pending, nullptr);
  --pending_count_;
  ForgetDeadline(*resolved);
  if (std::vector<WorkPtr>& held = found->second.held; !held.empty()) {
    Admit(held.front(), &found->second.pending);
    held.erase(held.begin());  // Admit kept it alive
    --held_count_;
  } else if (key.form == Key::Form::kUnnamed) {
    uses_.erase(found);  // its number does not come again
  }
  return resolved;
}

// Programs use most names again and again, some but once.
void TensorQueue::DropUnused() {
  std::erase_if(uses_,
                [](const auto& use) { return use.second.pending == nullptr && !use.second.named; });
  most_uses_ = 2 * uses_.size() + kFewestKept;
}

std::optional<Key> TensorQueue::KeyOf(const HandleState* handle) const {
  MutexLock lock(mutex_);
  const auto found = std::find_if(uses_.begin(), uses_.end(), [handle](const auto& use) {
    const WorkPtr& work = use.second.pending;
    return work != nullptr && work->handle.get() == handle && work->deadline == TimePoint::max();
  });
  return found == uses_.end() ? std::nullopt : std::optional<Key>(found->first);
}

void TensorQueue::HandOverDeadline(const Work& work) {
  MutexLock lock(mutex_);
  ForgetDeadline(work);
}

void TensorQueue::ForgetDeadline(const Work& work) {
  if (work.deadline != TimePoint::max()) deadlines_.erase({work.deadline, &work});
}

void TensorQueue::ReleaseName(const Key& key) {
  MutexLock lock(mutex_);
  const auto found = uses_.find(key);
  if (found == uses_.end()) return;
  found->second.named = false;
}

WorkPtr TensorQueue::EndEpoch(SetNumber set) {
  WorkPtr work = Resolve(Key::Join(set));
  MutexLock lock(mutex_);
  // The number of a set that was removed does not come again.
  if (const auto found = of_set_.find(set); found != of_set_.end()) {
    found->second.epoch = {};
    if (found->second.accepted == 0) of_set_.erase(found);
  }
  return work;
}

void TensorQueue::Close(const Status& why) {
  SIRTAKI_CHECK(!why.ok(), "a queue is closed with a cause");
  // Taken out under the lock, completed and dropped without it: completions ring doorbells, and the
  // last reference to a handle releases its name here.
  std::vector<WorkPtr> fresh;
  Uses uses;
  {
    MutexLock lock(mutex_);
    if (!closed_.ok()) return;
    try {
      pending_at_close_ = PendingCalls();
    } catch (const std::bad_alloc&) {  // a record tells of fewer calls then
    }
    closed_ = why;
    fresh.swap(fresh_);
    fresh_count_ = 0;
    uses.swap(uses_);
    pending_count_ = 0;
    held_count_ = 0;
    deadlines_.clear();
  }
  const auto complete = [&why](const WorkPtr& work) {
    if (work != nullptr && work->handle != nullptr) work->handle->Complete(why);
  };
  for (const auto& [key, use] : uses) {
    complete(use.pending);
    for (const WorkPtr& work : use.held) complete(work);
  }
}

TensorQueue::Account TensorQueue::GiveAccount() const {
  MutexLock lock(mutex_);
  Account account{closed_.ok() ? PendingCalls() : pending_at_close_, {}, {}};
  for (const auto& [set, of_set] : of_set_) {
    if (of_set.accepted > 0) account.calls[set] = of_set.accepted;
    if (of_set.epoch.joined) account.joined.insert(set);
  }
  return account;
}

std::vector<TensorQueue::Account::Call> TensorQueue::PendingCalls() const {
  std::vector<Account::Call> calls;
  calls.reserve(pending_count_);
  for (const auto& [key, use] : uses_) {
    const WorkPtr& work = use.pending;
    if (work != nullptr) {
      calls.push_back({key, work->request.asked, work->number, work->submitted});
    }
  }
  std::sort(calls.begin(), calls.end(), [](const auto& a, const auto& b) {
    return std::tie(a.key.set, a.number) < std::tie(b.key.set, b.number);
  });
  return calls;
}

bool TensorQueue::closed() const {
  MutexLock lock(mutex_);
  return !closed_.ok();
}

std::size_t TensorQueue::pending() const {
  MutexLock lock(mutex_);
  return pending_count_ + held_count_;
}

TimePoint TensorQueue::EarliestDeadline(Key* key, Duration* limit) const {
  MutexLock lock(mutex_);
  if (deadlines_.empty()) return TimePoint::max();
  const auto& [deadline, work] = *deadlines_.begin();
  if (key != nullptr) *key = work->request.key;
  if (limit != nullptr) *limit = deadline - work->submitted;
  return deadline;
}

}  // namespace sirtaki::core
