#include "core/trace/doing.h"

#include <utility>

namespace sirtaki::core::trace {

Doing::Scope::Scope(Doing& doing, Say say) : doing_(doing) {
  MutexLock lock(doing.mutex_);
  here_ = doing.says_.insert(doing.says_.end(), std::move(say));
}

Doing::Scope::~Scope() {
  MutexLock lock(doing_.mutex_);
  doing_.says_.erase(here_);
}

std::string Doing::Text(TimePoint now) const {
  MutexLock lock(mutex_);
  std::string text;
  for (const Say& say : says_) {
    const std::string words = say(now);
    if (!words.empty()) text += (text.empty() ? "" : "; ") + words;
  }
  return text;
}

}  // namespace sirtaki::core::trace
