// Ranks of a host have common memory once, and each of them may still write to it as if it were its
// own. A rank sees it at two places. At the common one it reads and writes what all have. At its own
// one it reads the same, until it writes there: the system then copies the page for this rank
// alone, which no longer sees there what others write, until it lets go of what it has written. A
// forked child keeps at its own place what the rank saw there.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/status.h"
#include "ops/shm/pool_fork.h"
#include "ops/shm/region.h"

namespace sirtaki::ops::shm {

// Different ranks use theirs at once; one rank's is not thread-safe.
class CommonMemory final : private KeptApart {
 public:
  // The name by which another process of the host finds the memory.
  struct Name {
    std::int64_t process = 0;
    std::int64_t descriptor = -1;
    std::int64_t token = 0;
  };
  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };

  // `bytes` of zeros, above 0; rounded up to whole pages. Errors: kUnsupported, with what the system
  // said.
  static core::Status Create(std::int64_t bytes, std::shared_ptr<CommonMemory>* memory);
  // Errors: kUnsupported, also where the name is that of a process of another host.
  static core::Status Open(const Name& name, std::int64_t bytes,
                           std::shared_ptr<CommonMemory>* memory);
  ~CommonMemory();
  CommonMemory(const CommonMemory&) = delete;
  CommonMemory& operator=(const CommonMemory&) = delete;

  const Name& name() const { return name_; }
  // Both begin with a page.
  std::byte* common() const { return region_->base(); }
  std::byte* own() const { return own_; }
  bool IsOwn(const void* memory) const {
    const auto* at = static_cast<const std::byte*>(memory);
    return at >= own_ && at < own_ + region_->size();
  }

  // Finds the pages that this rank has written at its own place, by their offsets from own():
  // ascending and apart. Reads 8 bytes for each page. Errors: kUnsupported.
  core::Status FindWritten(std::vector<Range>* written) const;
  // Lets go of whole pages that FindWritten has found: this rank sees there what all have.
  void LetGo(const Range& pages);

 private:
  CommonMemory(std::shared_ptr<Region> region, const Name& name)
      : region_(std::move(region)), name_(name) {}
  // Maps this rank's own place, and makes sure that pages can be told apart.
  core::Status MapOwn();
  // The last page begins with the token.
  std::int64_t last_page() const { return region_->size() - PageSize(); }

  void BeforeFork() override;
  void AfterForkInParent() override;
  void AfterForkInChild() override;

  const std::shared_ptr<Region> region_;
  const Name name_;
  std::byte* own_ = nullptr;
  int pages_ = -1;  // the system's table of this process's pages
  bool in_child_ = false;
  void* snapshot_ = nullptr;  // of own(), while a fork is under way; MAP_FAILED: no room
};

}  // namespace sirtaki::ops::shm
