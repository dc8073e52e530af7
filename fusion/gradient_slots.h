// Which gradients of a step have been seen: one slot for each parameter. The hooks of several
// autograd threads report to it at once; the thread in step() asks for the rest. Knows nothing of
// LibTorch, so that the thread sanitizer sees all of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

namespace sirtaki::fusion {

class GradientSlots {
 public:
  explicit GradientSlots(std::size_t count);

  std::size_t size() const { return size_; }

  // Marks the slot. False if it was reported already since the last Reset: the caller's gradient is
  // in flight and was written again. Thread-safe, never blocks. Precondition: slot < size(). What
  // the reporter wrote before is visible to who then sees it reported.
  bool Report(std::size_t slot);

  bool reported(std::size_t slot) const;

  // How many slots are not reported. Thread-safe; under concurrent reports a moment's value.
  std::size_t outstanding() const;

  // The slots that are not reported, ascending. Thread-safe, as above.
  std::vector<std::size_t> Unreported() const;

  // Makes every slot unreported again. A Report that runs at the same time counts before or after.
  void Reset();

 private:
  const std::size_t size_;
  std::unique_ptr<std::atomic<bool>[]> reported_;
  std::atomic<std::size_t> outstanding_;
};

}  // namespace sirtaki::fusion
