#include "ops/base/keep_forever.h"

#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"

namespace sirtaki::ops {
namespace {

struct Kept {
  LetGo let_go;
  std::shared_ptr<void> what;
};

struct AllKept {
  core::Mutex mutex;
  std::vector<std::shared_ptr<void>> forever SIRTAKI_GUARDED_BY(mutex);
  std::vector<Kept> for_now SIRTAKI_GUARDED_BY(mutex);
};

AllKept& OfThisProcess() {
  static AllKept& kept = *new AllKept;
  return kept;
}

}  // namespace

LetGo LetsGoAtOnce() {
  return [] { return true; };
}

void KeepForever(std::shared_ptr<void> what) {
  AllKept& kept = OfThisProcess();
  core::MutexLock lock(kept.mutex);
  kept.forever.push_back(std::move(what));
}

void KeepUntil(LetGo let_go, std::shared_ptr<void> what) {
  if (!let_go) return KeepForever(std::move(what));
  AllKept& kept = OfThisProcess();
  {
    core::MutexLock lock(kept.mutex);
    kept.for_now.push_back({std::move(let_go), std::move(what)});
  }
  DropKept();
}

void DropKept() {
  std::vector<Kept> gone;  // destroyed without the lock: a program's tensors may be among it
  AllKept& kept = OfThisProcess();
  core::MutexLock lock(kept.mutex);
  std::vector<Kept> still;
  for (Kept& one : kept.for_now) (one.let_go() ? gone : still).push_back(std::move(one));
  kept.for_now = std::move(still);
}

}  // namespace sirtaki::ops
