// A piece of memory that several processes map: an anonymous file, whose pages are taken when they
// are first touched. It is gone when the last process that maps it is: nothing can be left behind.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/machine/fork_guard.h"

namespace sirtaki::ops::shm {

std::int64_t PageSize();  // of the system

// The error of a system call that has failed just now is kUnsupported, with what errno says.
core::Status RefusedBySystem(const std::string& what);

class Region {
 public:
  // `bytes` of zeros; rounded up to whole pages. Takes address space only. `name`: "sirtaki ...",
  // as the kernel shows it (/proc/<pid>/maps). Errors: kUnsupported, with what the system said.
  static core::Status Create(const char* name, std::int64_t bytes, std::shared_ptr<Region>* region);
  // That of a process of this host, by its file descriptor there; maps it here, and not in forked
  // children, which may outlive that process and would keep its memory. A region of this process
  // itself is not mapped again. Errors: kUnsupported.
  static core::Status Open(pid_t process, int descriptor, std::int64_t bytes,
                           std::shared_ptr<Region>* region);
  // Memory of this process alone, which a forked child has a copy of.
  static core::Status CreatePrivate(std::int64_t bytes, std::shared_ptr<Region>* region);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* base() const { return base_; }
  std::int64_t size() const { return size_; }
  int descriptor() const { return descriptor_; }  // -1: private, or opened

  bool Contains(const void* memory) const {
    const auto* at = static_cast<const std::byte*>(memory);
    return at >= base_ && at < base_ + size_;
  }

  // Gives the pages that lie wholly within back to the system; they read as zeros afterwards, for
  // everyone. Does nothing where the region was opened, and in a forked child.
  void Discard(std::int64_t offset, std::int64_t bytes);

  // A forked child calls it for a shared region that was created: from now on this memory lies
  // here, private to the child. `memory`: a mapping of the same size, which moves; null: the shared
  // one goes on until a page is written to. Calls the system alone.
  void ReplaceInChild(std::byte* memory);

 private:
  Region(std::byte* base, std::int64_t size, int descriptor, bool is_private)
      : base_(base), size_(size), private_(is_private), descriptor_(descriptor) {}

  std::byte* const base_;
  const std::int64_t size_;
  const bool private_;
  const int fork_generation_ = core::ForkGeneration();
  int descriptor_;
  bool in_children_ = true;
};

}  // namespace sirtaki::ops::shm
