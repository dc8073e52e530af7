// The asynchronous forms of the collectives return a handle.
//
// From such a call until its operation has ended, its tensors must not be written, and those of the
// in-place forms must not be read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "sirtaki/export.h"

namespace sirtaki {

namespace detail {
class Pending;
}

// A Handle refers to an operation under way; copies refer to the same operation. The operation's
// name is in flight, and must not be used for another operation of the process set, until
// result() has returned, done() was true, or the last copy is gone. An in-place operation on a
// non-contiguous tensor is written back by result() or by a done() that returns true. The functions
// below are older names for its members.
class SIRTAKI_API Handle {
 public:
  Handle() = default;
  explicit Handle(std::shared_ptr<detail::Pending> pending) : pending_(std::move(pending)) {}

  bool valid() const noexcept { return pending_ != nullptr; }
  // Returns true if the operation has ended: poll().
  bool done() const;
  // Waits until the operation has ended, and throws what went wrong.
  void wait() const { result(); }
  // Waits as well, and returns its tensor: synchronize().
  at::Tensor result() const;
  // Calls callback(handle) once, after the operation has ended, well or badly: on a thread that the
  // library keeps for this, never on the calling thread or under a lock of the library. Callbacks of
  // several operations may run at the same time and in any order. There result() does not wait for
  // ranks; for tensors on a GPU it makes that thread's current stream wait. A callback may start
  // operations and wait for them. If it throws, the job ends as by abort(). Let callbacks end before
  // shutdown(), after which result() throws, and before main() does. Throws what done() throws.
  void then(std::function<void(const Handle&)> callback) const;
  const std::shared_ptr<detail::Pending>& pending() const { return pending_; }

 private:
  std::shared_ptr<detail::Pending> pending_;
};

// A GroupedHandle is the same for a grouped operation, which is one operation: it ends when all of
// its tensors are done.
class SIRTAKI_API GroupedHandle {
 public:
  GroupedHandle() = default;
  explicit GroupedHandle(std::shared_ptr<detail::Pending> pending) : pending_(std::move(pending)) {}

  bool valid() const noexcept { return pending_ != nullptr; }
  bool done() const;
  void wait() const { results(); }
  // Waits, and returns the tensors in the order of the call.
  std::vector<at::Tensor> results() const;
  void then(std::function<void(const GroupedHandle&)> callback) const;
  const std::shared_ptr<detail::Pending>& pending() const { return pending_; }

 private:
  std::shared_ptr<detail::Pending> pending_;
};

// Returns true if the operation has ended, well or badly; never blocks. Throws NotInitialized if
// the handle belongs to a session that was shut down, InvalidArgument for an empty handle. For
// tensors on a GPU it throws CUDA's errors too, and InvalidArgument while the current stream is
// captured in a CUDA graph; it can be asked again.
SIRTAKI_API bool poll(const Handle& handle);
SIRTAKI_API bool poll(const GroupedHandle& handle);

// Waits until the operation has ended and returns its tensor (a grouped operation's tensors, in the
// order of the call), or throws what went wrong. May be called several times. It does not use a
// core while it waits. For tensors on a GPU it does not wait for the end: the current stream does,
// so what is computed in that stream next finds the result. poll() is true as early, and makes the
// stream wait too. A send returns the tensor that was sent, a barrier an undefined one.
SIRTAKI_API at::Tensor synchronize(const Handle& handle);
SIRTAKI_API std::vector<at::Tensor> synchronize(const GroupedHandle& handle);

// Waits as synchronize() does and returns how many of the result's rows came from each rank of the
// process set, ascending by rank: for all-to-all, all-gather with different first dimensions,
// scatter, and gather at its root. For other operations it is empty. For a grouped operation there
// is one list for each tensor.
SIRTAKI_API std::vector<std::int64_t> received_splits(const Handle& handle);
SIRTAKI_API std::vector<std::vector<std::int64_t>> received_splits(const GroupedHandle& handle);

}  // namespace sirtaki
