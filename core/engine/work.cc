#include "core/engine/work.h"

#include <algorithm>
#include <utility>

namespace sirtaki::core {

HandleState::HandleState(std::shared_ptr<HandleWatcher> watcher, Key key)
    : watcher_(std::move(watcher)), key_(std::move(key)) {}

// Nobody can see the end any more, so the name must not stay taken.
HandleState::~HandleState() { Observe(); }

bool HandleState::Complete(Status status) {
  std::vector<std::function<void()>> next;
  {
    MutexLock lock(mutex_);
    if (done_.load(std::memory_order_relaxed)) return false;
    status_ = std::move(status);
    done_.store(true, std::memory_order_release);
    next.swap(next_);
  }
  // A read-modify-write, not a load: either it sees the waiter's increment, or that increment reads
  // from it and then the waiter sees done_. With a plain load both could miss each other.
  if (waiters_.fetch_add(0, std::memory_order_seq_cst) > 0 && watcher_) watcher_->Completed();
  for (const std::function<void()>& each : next) each();
  return true;
}

void HandleState::Then(std::function<void()> next) {
  {
    MutexLock lock(mutex_);
    if (!done_.load(std::memory_order_relaxed)) {
      next_.push_back(std::move(next));
      return;
    }
  }
  next();
}

Status HandleState::AfterWait() const {
  if (done()) return status_;
  return {StatusCode::kTimedOut, "the call has not ended by the deadline of this wait"};
}

void HandleState::EndPiece(const Status& status) {
  // The first failure that gets through counts.
  if (!status.ok()) {
    Complete(status);
  } else if (pieces_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    Complete(Status::Ok());
  }
}

void HandleState::Observe() {
  if (!observed_.exchange(true, std::memory_order_acq_rel) && watcher_) {
    watcher_->Observed(key_);
  }
}

std::int64_t Work::InputBytes() const {
  const SignaturePtr& signature = request.signature();
  if (signature == nullptr) return 0;
  if (parts.empty()) return InputBytesOf(*signature, *this);
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < parts.size() && i < signature->parts.size(); ++i) {
    bytes += InputBytesOf(*signature->parts[i], *parts[i]);
  }
  return bytes;
}

std::int64_t InputBytesOf(const Signature& signature, const Work& work) {
  if (work.input == nullptr) return 0;
  // A refused request may have any shape.
  auto bytes = static_cast<std::uint64_t>(signature.Bytes());
  if (FirstDimensionVaries(signature.kind)) bytes *= static_cast<std::uint64_t>(work.rows);
  return static_cast<std::int64_t>(bytes);
}

std::int64_t RowsOf(std::int64_t rows, std::int64_t members, std::int64_t index) {
  return rows / members + (index < rows % members ? 1 : 0);
}

std::int64_t FirstRowOf(std::int64_t rows, std::int64_t members, std::int64_t index) {
  return rows / members * index + std::min(index, rows % members);
}

}  // namespace sirtaki::core
