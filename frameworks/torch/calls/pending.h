// Public handles refer to a Pending.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace sirtaki::detail {

// An operation that was submitted. Thread-safe. All throw Error: NotInitialized if its session has
// ended; what went wrong, but Poll; and where the calling thread's stream of a GPU cannot wait for
// it, CUDA's errors or InvalidArgument, which it may be asked again after.
class Pending {
 public:
  virtual ~Pending() = default;

  virtual bool Poll() = 0;  // true if it has ended
  // Waits. One tensor, or those of a grouped operation; undefined for a barrier.
  virtual std::vector<at::Tensor> Results() = 0;
  // Waits. The result of an operation that is not grouped; undefined for a barrier.
  at::Tensor Synchronize() { return std::move(Results().front()); }
  // Waits. For each of the results the rows that came from each member; empty where nothing tells.
  virtual std::vector<std::vector<std::int64_t>> ReceivedRows() = 0;
  // Calls `next` once when Poll is true, at once or on a thread that must not be held up.
  virtual void Then(std::function<void()> next) = 0;
  // Ends the job, and says why.
  virtual void Abort(const std::string& why) = 0;
  // Gives a member that had joined, and so took part with nothing; -1: none had. After the end.
  virtual int joined() const = 0;
};

}  // namespace sirtaki::detail
