#include "ops/shm/region.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <string_view>

#include "core/base/thread_annotations.h"
#include "core/base/types.h"

namespace sirtaki::ops::shm {

using core::Status;
using core::StatusCode;

Status RefusedBySystem(const std::string& what) {
  return {StatusCode::kUnsupported, what + ": " + std::strerror(errno)};
}

std::int64_t PageSize() {
  static const std::int64_t size = sysconf(_SC_PAGESIZE);
  return size;
}

namespace {

constexpr std::string_view kShownAs = "/memfd:sirtaki";  // the names of all begin so

// `descriptor` -1: private memory.
Status Map(int descriptor, std::int64_t bytes, std::byte** base) {
  const int kind = descriptor < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* const memory = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE,
                            kind | MAP_NORESERVE, descriptor, 0);
  if (memory == MAP_FAILED)
    return RefusedBySystem("cannot map " + std::to_string(bytes) + " bytes");
  // Where the system has been set to give shared memory huge pages if asked. Private memory gets
  // none: where free memory is in pieces, first touching them takes three times as long.
  if (descriptor >= 0) {
    static_cast<void>(madvise(memory, static_cast<std::size_t>(bytes), MADV_HUGEPAGE));
  }
  *base = static_cast<std::byte*>(memory);
  return Status::Ok();
}

// Those of this process, so that threads that act as ranks see one address each, and so do tools
// that watch them.
struct Here {
  core::Mutex mutex;
  std::map<int, std::weak_ptr<Region>> by_descriptor SIRTAKI_GUARDED_BY(mutex);
};
Here& OfThisProcess() {
  static Here& here = *new Here;
  return here;
}

}  // namespace

Status Region::Create(const char* name, std::int64_t bytes, std::shared_ptr<Region>* region) {
  bytes = core::RoundUp(bytes, PageSize());
  rlimit files{};
  if (getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur < static_cast<rlim_t>(bytes)) {
    // The system would end the process for it.
    return {StatusCode::kUnsupported, "ulimit -f forbids files of " + std::to_string(bytes) +
                                          " bytes, and shared memory counts as one"};
  }
  const int descriptor = memfd_create(name, MFD_CLOEXEC);
  if (descriptor < 0) return RefusedBySystem("cannot make shared memory (memfd_create)");
  std::byte* base = nullptr;
  Status status =
      ftruncate(descriptor, bytes) == 0
          ? Map(descriptor, bytes, &base)
          : RefusedBySystem("cannot size shared memory to " + std::to_string(bytes) + " bytes");
  if (!status.ok()) {
    close(descriptor);
    return status;
  }
  region->reset(new Region(base, bytes, descriptor, false));
  core::MutexLock lock(OfThisProcess().mutex);
  OfThisProcess().by_descriptor[descriptor] = *region;
  return status;
}

Status Region::CreatePrivate(std::int64_t bytes, std::shared_ptr<Region>* region) {
  bytes = core::RoundUp(bytes, PageSize());
  std::byte* base = nullptr;
  Status status = Map(-1, bytes, &base);
  if (status.ok()) region->reset(new Region(base, bytes, -1, true));
  return status;
}

Status Region::Open(pid_t process, int descriptor, std::int64_t bytes,
                    std::shared_ptr<Region>* region) {
  if (process == getpid()) {
    core::MutexLock lock(OfThisProcess().mutex);
    const auto found = OfThisProcess().by_descriptor.find(descriptor);
    if (found != OfThisProcess().by_descriptor.end()) *region = found->second.lock();
    if (*region != nullptr && (*region)->size() == bytes) return Status::Ok();
    return {StatusCode::kUnsupported, "this process has no such shared memory"};
  }
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  // Another process may have this number here, and opening what it has may do something.
  char target[64];
  const ssize_t length = readlink(path.c_str(), target, sizeof target);
  if (length < 0) return RefusedBySystem("cannot look at " + path);
  if (!std::string_view(target, static_cast<std::size_t>(length)).starts_with(kShownAs)) {
    return {StatusCode::kUnsupported, path + " is not the memory of a rank of this job"};
  }
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) return RefusedBySystem("cannot open " + path);
  std::byte* base = nullptr;
  // Touching what a shorter file does not have would be fatal.
  const off_t size = lseek(opened, 0, SEEK_END);
  Status status = size == bytes ? Map(opened, bytes, &base)
                                : Status(StatusCode::kUnsupported,
                                         path + " is not the memory of a rank of this job");
  close(opened);
  if (!status.ok()) return status;
  region->reset(new Region(base, bytes, -1, false));
  (*region)->in_children_ = madvise(base, static_cast<std::size_t>(bytes), MADV_DONTFORK) != 0;
  return status;
}

Region::~Region() {
  if (!in_children_ && core::ForkGeneration() != fork_generation_) return;  // others may be there
  munmap(base_, static_cast<std::size_t>(size_));
  if (descriptor_ < 0) return;
  core::MutexLock lock(OfThisProcess().mutex);
  OfThisProcess().by_descriptor.erase(descriptor_);
  close(descriptor_);
}

void Region::Discard(std::int64_t offset, std::int64_t bytes) {
  const std::int64_t first = core::RoundUp(offset, PageSize());
  const std::int64_t last = (offset + bytes) / PageSize() * PageSize();
  if (first >= last) return;
  const auto size = static_cast<std::size_t>(last - first);
  if (private_) {
    static_cast<void>(madvise(base_ + first, size, MADV_DONTNEED));
    return;
  }
  // An opened one has no descriptor any more, and its owner is who discards; a child of the owner
  // would take the pages from its parent.
  if (descriptor_ < 0 || core::ForkGeneration() != fork_generation_) return;
  static_cast<void>(
      fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, last - first));
}

void Region::ReplaceInChild(std::byte* memory) {
  const auto size = static_cast<std::size_t>(size_);
  if (memory != nullptr) {
    mremap(memory, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, base_);
  } else {
    // Gone first: the limit of addresses may be near. Where this fails, touching it is the end of
    // the child, but nobody else's memory is changed.
    munmap(base_, size);
    mmap(base_, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, descriptor_,
         0);
  }
  close(descriptor_);
  descriptor_ = -1;
}

}  // namespace sirtaki::ops::shm
