// What the program of this rank is in the middle of, told when others ask why the rank is late.
#pragma once

#include <functional>
#include <list>
#include <string>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"

namespace sirtaki::core::trace {

// Thread-safe. The words are made only if somebody asks.
class Doing {
 public:
  // Any thread may call it; it must neither block nor throw. Empty: there is nothing to tell.
  using Say = std::function<std::string(TimePoint now)>;

  // A scope has its words told as long as it lasts.
  class Scope {
   public:
    Scope(Doing& doing, Say say) SIRTAKI_EXCLUDES(doing.mutex_);
    ~Scope() SIRTAKI_EXCLUDES(doing_.mutex_);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Doing& doing_;
    std::list<Say>::iterator here_;
  };

  // "in the pipeline "p": …"; of several threads one behind the other. Empty: nothing is known.
  std::string Text(TimePoint now) const SIRTAKI_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  std::list<Say> says_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::core::trace
