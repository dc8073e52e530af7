// The backward() calls that are under way, and whose gradients each of them has met: they are
// averaged before it returns.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace sirtaki::detail {

// One optimizer, or module, whose gradients are averaged at the end of a backward(). Begin and the
// functions behind it are called at the end of a backward(), on the thread that ends it; of several
// that it has met all begin before any of them is waited for, so that ranks whose backward() meet
// them in another order, or one by one, do not wait for each other.
class AveragedAtEnd {
 public:
  virtual ~AveragedAtEnd() = default;

  // Submits what is missing. Throws what a submission throws; then it is collected all the same.
  virtual void BeginEnd() = 0;
  // Takes the averages that are there, with `wait` all of them; true if none is outstanding.
  virtual bool CollectEnd(bool wait) = 0;
  // Waits for a moment, for one of those that are outstanding.
  virtual void WaitABit() = 0;
  // Throws the first thing that went wrong.
  virtual void ConcludeEnd() = 0;
  // The backward() has thrown, and its end was dropped: tells the other ranks, and waits for none.
  // `outermost`: there is none around it.
  virtual void FailEnd(bool outermost) noexcept = 0;
  // The outermost backward() has thrown. It has met none of the gradients, but one within it has, and
  // has thrown when all were submitted.
  virtual void LeaveUnheard() noexcept = 0;
  // A backward() meets its first gradient, or meets one again after an inner backward(): the average
  // that a backward() has left which threw is collected. May wait.
  virtual void BeginAgain() = 0;

  // Whether a backward() has met it that has not ended. One that has thrown may end, on autograd's
  // thread of a GPU, a moment after its caller has caught the error.
  bool within_backward() const { return running_ > 0; }

 protected:
  // An owner says by this that all ranks learn, by the average that is under way, that a backward() has
  // thrown on one of them. The backward() around it then average nothing more of this owner, on any
  // rank, and throw `error`.
  void Fail(const std::exception_ptr& error) {
    failure_ = std::make_shared<const std::exception_ptr>(error);
  }
  void ThrowFailure() const {
    if (const auto failure = failure_.load()) std::rethrow_exception(*failure);
  }

 private:
  friend class BackwardEnds;
  std::atomic<std::shared_ptr<const std::exception_ptr>> failure_;  // until the outermost is over
  std::atomic<int> running_{0};
  std::atomic<int> joined_{-1};  // the last backward() that it takes part in
  std::atomic<int> whole_{-1};   // and the last that it was given as a whole
};

// Thread-safe. Keeps nothing alive.
class BackwardEnds {
 public:
  using Owner = std::shared_ptr<AveragedAtEnd>;

  // Within a backward(), which goes on: `owner` takes part in its end. `on_cpu`: a gradient on the
  // CPU was met, on a thread that serves no other backward(). `whole`: of the backward() that are
  // called within this one, none does. False if another thread's backward() has met a gradient of
  // the same owner and has not ended.
  bool Join(const Owner& owner, bool on_cpu, bool whole = false);

  // The backward() that calls this, and those around it, average nothing more of the owner, and throw
  // `error`. Outside of backward() it does nothing.
  void FailAround(const Owner& owner, const std::exception_ptr& error);

 private:
  struct Backward;

  std::shared_ptr<Backward> FindOrBegin(int task);
  void Enclose(const Owner& owner, int task);

  std::mutex mutex_;  // guards what follows
  std::unordered_map<int, std::weak_ptr<Backward>> running_;
};

}  // namespace sirtaki::detail
