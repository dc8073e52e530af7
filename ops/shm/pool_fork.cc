#include "ops/shm/pool_fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "core/base/log.h"
#include "core/base/thread_annotations.h"
#include "ops/shm/pool.h"

namespace sirtaki::ops::shm {

namespace {

// CopyData copies the pages of the file that hold something: what was never touched stays untouched. It
// reads the file, since other threads may write to their tensors meanwhile, as they may during any
// fork.
void CopyData(const Region& from, std::int64_t first, std::int64_t last, std::byte* to) {
  while (first < last) {
    const off_t begin = lseek(from.descriptor(), first, SEEK_DATA);
    if (begin < 0 || begin >= last) return;
    const off_t hole = lseek(from.descriptor(), begin, SEEK_HOLE);
    const std::int64_t end = hole < 0 ? last : std::min<std::int64_t>(hole, last);
    for (first = begin; first < end;) {
      const ssize_t read =
          pread(from.descriptor(), to + first, static_cast<std::size_t>(end - first), first);
      if (read <= 0) return;
      first += read;
    }
  }
}

}  // namespace

// The handlers, and what they see to: held from before the fork until after it, in both processes.
struct MemoryAtFork {
  core::Mutex mutex;
  std::vector<KeptApart*> memory SIRTAKI_GUARDED_BY(mutex);

  static MemoryAtFork& Get() {
    static MemoryAtFork& all = *[] {
      auto* made = new MemoryAtFork;
      pthread_atfork(&Before, &InParent, &InChild);
      return made;
    }();
    return all;
  }

  static void Before() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
    Get().mutex.Lock();
    for (KeptApart* memory : Get().memory) memory->BeforeFork();
  }
  static void InParent() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
    for (KeptApart* memory : Get().memory) memory->AfterForkInParent();
    Get().mutex.Unlock();
  }
  static void InChild() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
    for (KeptApart* memory : Get().memory) memory->AfterForkInChild();
    Get().mutex.Unlock();
  }
};

void AddToFork(KeptApart& memory) {
  MemoryAtFork& all = MemoryAtFork::Get();
  core::MutexLock lock(all.mutex);
  all.memory.push_back(&memory);
}

void RemoveFromFork(KeptApart& memory) {
  MemoryAtFork& all = MemoryAtFork::Get();
  core::MutexLock lock(all.mutex);
  std::erase(all.memory, &memory);
}

void WarnOfFork() {
  SIRTAKI_LOG(kWarning,
              "a forked process sees changes of this one's tensors: no addresses for a copy");
}

void Pool::BeforeFork() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  mutex_.Lock();
  if (!options_.shared || in_child_) return;
  void* const snapshot =
      mmap(nullptr, static_cast<std::size_t>(region_->size()), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  snapshot_ = snapshot == MAP_FAILED ? nullptr : static_cast<std::byte*>(snapshot);
  if (snapshot_ == nullptr) return;
  std::int64_t first = 0;  // of the blocks side by side that end at `last`
  std::int64_t last = 0;
  for (std::int64_t at = 0; at < end_;) {
    const std::uint16_t state = blocks_[static_cast<std::size_t>(at / kPage)];
    const std::int64_t size = state == 0 ? kPage : BytesOfClass(state & ~kInUse);
    if ((state & kInUse) != 0) {
      if (at != last) {
        CopyData(*region_, first, last, snapshot_);
        first = at;
      }
      last = at + size;
    }
    at += size;
  }
  CopyData(*region_, first, last, snapshot_);
}

void Pool::AfterForkInParent() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  const bool failed = options_.shared && !in_child_ && snapshot_ == nullptr;
  if (snapshot_ != nullptr) munmap(snapshot_, static_cast<std::size_t>(region_->size()));
  snapshot_ = nullptr;
  mutex_.Unlock();
  if (failed) WarnOfFork();
}

void Pool::AfterForkInChild() SIRTAKI_NO_THREAD_SAFETY_ANALYSIS {
  if (options_.shared && !in_child_) {
    region_->ReplaceInChild(snapshot_);
    snapshot_ = nullptr;
    in_child_ = true;
  }
  mutex_.Unlock();
}

}  // namespace sirtaki::ops::shm
