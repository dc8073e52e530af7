#include "ops/base/keep_forever.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <new>
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
  std::vector<Kept> all SIRTAKI_GUARDED_BY(mutex);  // without let_go: for ever
};

AllKept& OfThisProcess() {
  static AllKept& kept = *new AllKept;
  return kept;
}

// There is no memory to remember it: it stays all the same, and nobody can reach it.
void Leak(std::shared_ptr<void> what) {
  alignas(std::shared_ptr<void>) std::array<std::byte, sizeof(std::shared_ptr<void>)> place;
  new (place.data()) std::shared_ptr<void>(std::move(what));
}

void Keep(LetGo let_go, std::shared_ptr<void> what) {
  AllKept& kept = OfThisProcess();
  core::MutexLock lock(kept.mutex);
  try {
    kept.all.emplace_back();
  } catch (const std::bad_alloc&) {
    return Leak(std::move(what));
  }
  kept.all.back() = {std::move(let_go), std::move(what)};
}

}  // namespace

LetGo LetsGoAtOnce() {
  return [] { return true; };
}

void KeepForever(std::shared_ptr<void> what) { Keep(nullptr, std::move(what)); }

void KeepUntil(LetGo let_go, std::shared_ptr<void> what) {
  const bool may_go = let_go != nullptr;
  Keep(std::move(let_go), std::move(what));
  if (may_go) DropKept();
}

void DropKept() {
  std::vector<Kept> gone;  // destroyed without the lock: a program's tensors may be among it
  AllKept& kept = OfThisProcess();
  core::MutexLock lock(kept.mutex);
  try {
    gone.reserve(kept.all.size());
    const auto first_gone = std::partition(kept.all.begin(), kept.all.end(), [](const Kept& one) {
      return !one.let_go || !one.let_go();
    });
    std::move(first_gone, kept.all.end(), std::back_inserter(gone));
    kept.all.erase(first_gone, kept.all.end());
  } catch (...) {  // memory is short: all of it stays until it is asked again
  }
}

}  // namespace sirtaki::ops
