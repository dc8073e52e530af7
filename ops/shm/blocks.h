// The channels of a rank take blocks of its session memory, and the others find theirs here: a
// directory by the numbers of the sets, then the blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "core/base/types.h"
#include "ops/shm/local_group.h"

namespace sirtaki::ops::shm {

inline constexpr int kLanes = 2;

// How far a member has come on one lane, in units of kUnit bytes of its stream.
struct Progress {
  SharedCounter written;
  SharedCounter read;  // of everybody's
};

// The block of one set lies in the session memory of each member. It never serves another set: who
// left last may still look at it.
struct SetBlock {
  std::array<Progress, kLanes> progress;
  std::array<std::int64_t, kLanes> rings;  // where they begin in the session memory
};

// The bytes of a set's rings, by lane, are the same on all members.
std::array<std::int64_t, kLanes> RingBytesOf(core::SetNumber set);

// Thread-safe.
class Blocks {
 public:
  explicit Blocks(LocalGroup& group) : group_(group) {}

  // Makes this rank's block of a set and enters it in the directory. Errors: kBackend when too many
  // sets are alive.
  core::Status Make(core::SetNumber set) SIRTAKI_EXCLUDES(mutex_);
  // Precondition: no member reads the rings any more.
  void Remove(core::SetNumber set) SIRTAKI_EXCLUDES(mutex_);

  // Null: the member has not made it yet.
  SetBlock* Find(int index, core::SetNumber set) const;
  // Changes whenever a member has made one.
  SharedCounter& Changes(int index) const { return DirectoryOf(index).changes; }

 private:
  static constexpr std::size_t kEntries = 8192;
  struct Directory {
    SharedCounter changes;
    // The set's number + 1 above the block's place in units of 64 bytes; 0: free.
    std::array<std::atomic<std::uint64_t>, kEntries> entries;
  };
  // Blocks, which are not given back; then rings, which are.
  static constexpr std::int64_t kBlocksBegin =
      LocalGroup::kChannelsBegin + static_cast<std::int64_t>(sizeof(Directory));
  static constexpr std::int64_t kRingsBegin = LocalGroup::kChannelsBegin + (std::int64_t{32} << 20);

  Directory& DirectoryOf(int index) const {
    return *reinterpret_cast<Directory*>(group_.SessionMemory(index) + LocalGroup::kChannelsBegin);
  }
  // -1: none is left.
  std::int64_t TakeRing(std::int64_t bytes) SIRTAKI_REQUIRES(mutex_);

  LocalGroup& group_;
  core::Mutex mutex_;
  std::int64_t next_block_ SIRTAKI_GUARDED_BY(mutex_) = kBlocksBegin;
  std::int64_t next_ring_ SIRTAKI_GUARDED_BY(mutex_) = kRingsBegin;
  struct FreeRing {
    std::int64_t begin;
    std::int64_t bytes;
  };
  std::vector<FreeRing> free_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::ops::shm
