#include "ops/base/keep_forever.h"

#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"

namespace sirtaki::ops {

void KeepForever(std::shared_ptr<void> what) {
  static core::Mutex& mutex = *new core::Mutex;
  static auto& kept = *new std::vector<std::shared_ptr<void>>;
  core::MutexLock lock(mutex);
  kept.push_back(std::move(what));
}

}  // namespace sirtaki::ops
