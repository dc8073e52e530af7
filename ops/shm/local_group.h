// The ranks of a host that share memory: what each of them lets the others see, and whether they
// are alive.
//
// Each rank has a session memory, zeroed at first: a page with its token and its doorbell, then
// mailboxes (ops/shm/transport), then what the collectives need (ops/shm/backend). Beside it the
// pool of its process. Both are mapped by all.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "ops/base/keep_forever.h"
#include "ops/shm/pool.h"
#include "ops/shm/region.h"
#include "ops/shm/shared_counter.h"

namespace sirtaki::ops::shm {

struct LocalGroupOptions {
  int rank = 0;
  // The process's pool; null: none of this rank's tensors lie in shared memory.
  std::shared_ptr<Pool> pool;
  // Ranks that are threads of one process see each other's memory as it is, wherever it lies.
  // False: they go through the session memory all the same.
  bool threads_share_all = true;
};

// Made in two steps, with an exchange of strings between. Then immutable, except the memory: any
// thread may use it.
class LocalGroup {
 public:
  // Where the mailboxes and the channels' memory begin and end in each session memory.
  static constexpr std::int64_t kMailboxesBegin = 4096;
  static constexpr std::int64_t kChannelsBegin = std::int64_t{64} << 20;
  static constexpr std::int64_t kEnd = std::int64_t{1} << 30;

  // Makes this rank's session memory. `announcement`: for the others. Errors: kUnsupported.
  static core::Status Make(const LocalGroupOptions& options, std::unique_ptr<LocalGroup>* group,
                           std::string* announcement);
  // Maps what the others have. `ranks`: of the group, this one among them; `announcements`: theirs,
  // in that order. Errors: kUnsupported, naming the rank whose memory cannot be seen from here.
  core::Status Join(const core::RankRanges& ranks, std::span<const std::string> announcements);
  ~LocalGroup();
  LocalGroup(const LocalGroup&) = delete;
  LocalGroup& operator=(const LocalGroup&) = delete;

  // ---- after Join ----
  const core::RankRanges& ranks() const { return ranks_; }
  int size() const { return static_cast<int>(members().size()); }
  int self() const { return self_; }  // this rank's index
  // -1 if the rank is not in the group.
  int IndexOf(int rank) const;
  int RankOf(int index) const { return members()[static_cast<std::size_t>(index)].rank; }

  // The session memory of a member, as it is mapped here: kEnd bytes.
  std::byte* SessionMemory(int index) const;
  // Rung when something has happened that the member's engine may wait for.
  SharedCounter& Bell(int index) const;

  // How this rank's memory is named to the others; -1: they cannot see it.
  std::int64_t OffsetOf(const void* memory) const;
  // What a member has named, as it is mapped here.
  std::byte* At(int index, std::int64_t offset) const;

  // Memory that the others see, as long as the pool lasts; plain memory without one.
  core::MemorySource& memory() const;

  // This rank takes its memory back, whatever the others are doing with it: what they read there
  // after that is nothing that it has given. Before anybody here learns of it.
  void GiveUp();
  // The answer is that of what was read before the call.
  bool HasGivenUp(int index) const;

  // Whether no member can touch another's memory any more: each has destroyed its group, or has ended.
  LetGo WhenAllHaveLeft() const;

  // Whether CheckPeers sees the process of any other member: not those that are threads of this one,
  // nor before Linux 5.3.
  bool SeesProcesses() const;
  // kPeerLost, naming it, if the process of a member has ended. Costs one system call.
  core::Status CheckPeers() const;

 private:
  struct Member {
    int rank = -1;
    pid_t process = 0;
    std::shared_ptr<Region> session;
    std::shared_ptr<Region> pool;
  };

  struct All {
    All() = default;
    ~All();
    All(const All&) = delete;
    All& operator=(const All&) = delete;

    std::vector<Member> members;
    std::vector<pollfd> ends;  // their processes' pidfds; -1: this process, or the kernel has none
  };

  explicit LocalGroup(LocalGroupOptions options) : options_(std::move(options)) {}
  const std::vector<Member>& members() const { return all_->members; }

  const LocalGroupOptions options_;
  std::shared_ptr<Region> session_;  // this rank's
  core::RankRanges ranks_;
  const std::shared_ptr<All> all_ = std::make_shared<All>();
  int self_ = 0;
  bool one_process_ = false;  // and all memory is shared
};

}  // namespace sirtaki::ops::shm
