// A watcher of a handle that calls functions, perhaps null.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "core/engine/work.h"

namespace sirtaki::tests {

class CallingWatcher final : public core::HandleWatcher {
 public:
  explicit CallingWatcher(std::function<void()> completed, std::function<void()> observed = nullptr)
      : completed_(std::move(completed)), observed_(std::move(observed)) {}
  void Completed() override {
    if (completed_) completed_();
  }
  void Observed(const core::Key& /*key*/) override {
    if (observed_) observed_();
  }

 private:
  const std::function<void()> completed_;
  const std::function<void()> observed_;
};

inline std::shared_ptr<CallingWatcher> WhenCompleted(std::function<void()> call) {
  return std::make_shared<CallingWatcher>(std::move(call));
}
inline std::shared_ptr<CallingWatcher> WhenObserved(std::function<void()> call) {
  return std::make_shared<CallingWatcher>(nullptr, std::move(call));
}

}  // namespace sirtaki::tests
