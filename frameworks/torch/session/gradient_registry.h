// The gradients that are being averaged in a session, so that two optimizers of the same parameter
// share one reduction.
#pragma once

#include <memory>
#include <unordered_map>

#include "core/base/thread_annotations.h"
#include "core/protocol/request.h"

namespace sirtaki::detail {

class ParameterGradient;

// Thread-safe. Keeps nothing alive.
class GradientRegistry {
 public:
  // Null if nobody has it. `parameter`: the address of its TensorImpl.
  std::shared_ptr<ParameterGradient> OfParameter(const void* parameter) const {
    core::MutexLock lock(mutex_);
    return Find(by_parameter_, parameter);
  }
  std::shared_ptr<ParameterGradient> OfKey(const core::Key& key) const {
    core::MutexLock lock(mutex_);
    return Find(by_key_, key);
  }

  void Add(const void* parameter, const core::Key& key,
           const std::shared_ptr<ParameterGradient>& gradient) {
    core::MutexLock lock(mutex_);
    by_parameter_[parameter] = gradient;
    by_key_[key] = gradient;
    if (by_parameter_.size() + by_key_.size() >= 2 * after_sweep_ + 128) Sweep();
  }

 private:
  template <class Map, class Key>
  static std::shared_ptr<ParameterGradient> Find(const Map& map, const Key& key) {
    const auto found = map.find(key);
    return found == map.end() ? nullptr : found->second.lock();
  }

  // Forgets those that are gone: programs may make optimizers again and again.
  void Sweep() SIRTAKI_REQUIRES(mutex_) {
    std::erase_if(by_parameter_, [](const auto& entry) { return entry.second.expired(); });
    std::erase_if(by_key_, [](const auto& entry) { return entry.second.expired(); });
    after_sweep_ = by_parameter_.size() + by_key_.size();
  }

  mutable core::Mutex mutex_;
  std::unordered_map<const void*, std::weak_ptr<ParameterGradient>> by_parameter_
      SIRTAKI_GUARDED_BY(mutex_);
  std::unordered_map<core::Key, std::weak_ptr<ParameterGradient>, core::KeyHash> by_key_
      SIRTAKI_GUARDED_BY(mutex_);
  std::size_t after_sweep_ SIRTAKI_GUARDED_BY(mutex_) = 0;
};

}  // namespace sirtaki::detail
