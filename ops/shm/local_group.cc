#include "ops/shm/local_group.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <type_traits>
#include <utility>

namespace sirtaki::ops::shm {

using core::Status;
using core::StatusCode;

namespace {

// The first page of a session memory.
struct Head {
  std::uint64_t token;
  SharedCounter bell;
  std::atomic<bool> gave_up;
  std::atomic<bool> left;
  static_assert(std::atomic<bool>::is_always_lock_free);
};
static_assert(sizeof(Head) <= LocalGroup::kMailboxesBegin);

// A rank says this of its memory, to processes of its host.
struct Announcement {
  std::uint64_t token = 0;
  std::int64_t process = 0;
  int session = -1;  // file descriptors there
  int pool = -1;     // -1: none
  std::int64_t pool_bytes = 0;
};
static_assert(std::has_unique_object_representations_v<Announcement>);

std::uint64_t RandomToken() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) ^ device() ^ 1;
}

Head& HeadOf(const Region& session) { return *reinterpret_cast<Head*>(session.base()); }

int OpenProcess(pid_t process) {
  return static_cast<int>(syscall(SYS_pidfd_open, process, 0U));  // -1 before Linux 5.3
}

}  // namespace

Status LocalGroup::Make(const LocalGroupOptions& options, std::unique_ptr<LocalGroup>* group,
                        std::string* announcement) {
  std::unique_ptr<LocalGroup> made(new LocalGroup(options));
  Status status = Region::Create("sirtaki session", kEnd, &made->session_);
  if (!status.ok()) return status;
  Announcement mine;
  mine.token = RandomToken();
  mine.process = getpid();
  mine.session = made->session_->descriptor();
  if (options.pool != nullptr) {
    mine.pool = options.pool->region().descriptor();
    mine.pool_bytes = options.pool->region().size();
  }
  HeadOf(*made->session_).token = mine.token;
  announcement->assign(reinterpret_cast<const char*>(&mine), sizeof mine);
  *group = std::move(made);
  return status;
}

Status LocalGroup::Join(const core::RankRanges& ranks, std::span<const std::string> announcements) {
  ranks_ = ranks;
  bool one_process = true;
  std::size_t next = 0;
  for (const int rank : ranks.ToVector()) {
    const std::string of_rank = "the memory of rank " + std::to_string(rank) + ": ";
    const std::string& told = announcements[next++];
    Announcement theirs;
    if (told.size() != sizeof theirs) {
      return {StatusCode::kUnsupported, of_rank + "what it says of it is damaged"};
    }
    std::memcpy(&theirs, told.data(), sizeof theirs);
    const auto process = static_cast<pid_t>(theirs.process);
    Member& member = all_->members.emplace_back();
    pollfd& end = all_->ends.emplace_back(pollfd{-1, POLLIN, 0});
    member.rank = rank;
    member.process = process;
    if (rank == options_.rank) self_ = size() - 1;
    Status status = Region::Open(process, theirs.session, kEnd, &member.session);
    if (status.ok() && HeadOf(*member.session).token != theirs.token) {
      status = {StatusCode::kUnsupported, "it belongs to another job"};
    }
    if (status.ok() && theirs.pool >= 0) {
      status = Region::Open(process, theirs.pool, theirs.pool_bytes, &member.pool);
    }
    if (!status.ok()) return {StatusCode::kUnsupported, of_rank + status.message()};
    if (process == getpid()) continue;
    one_process = false;
    end.fd = OpenProcess(process);
  }
  one_process_ = one_process && options_.threads_share_all;
  return Status::Ok();
}

LocalGroup::~LocalGroup() {
  if (session_ != nullptr) HeadOf(*session_).left.store(true);
}

LocalGroup::All::~All() {
  for (const pollfd& end : ends) {
    if (end.fd >= 0) close(end.fd);
  }
}

int LocalGroup::IndexOf(int rank) const {
  for (std::size_t i = 0; i < members().size(); ++i) {
    if (members()[i].rank == rank) return static_cast<int>(i);
  }
  return -1;
}

std::byte* LocalGroup::SessionMemory(int index) const {
  return members()[static_cast<std::size_t>(index)].session->base();
}

SharedCounter& LocalGroup::Bell(int index) const {
  return HeadOf(*members()[static_cast<std::size_t>(index)].session).bell;
}

void LocalGroup::GiveUp() { HeadOf(*session_).gave_up.store(true); }

bool LocalGroup::HasGivenUp(int index) const {
  return HeadOf(*members()[static_cast<std::size_t>(index)].session).gave_up.load();
}

std::int64_t LocalGroup::OffsetOf(const void* memory) const {
  if (one_process_) return reinterpret_cast<std::int64_t>(memory);
  if (options_.pool == nullptr || !options_.pool->Contains(memory)) return -1;
  return options_.pool->OffsetOf(memory);
}

std::byte* LocalGroup::At(int index, std::int64_t offset) const {
  if (one_process_) return reinterpret_cast<std::byte*>(offset);
  return members()[static_cast<std::size_t>(index)].pool->base() + offset;
}

core::MemorySource& LocalGroup::memory() const {
  return options_.pool != nullptr ? *options_.pool : core::PlainMemory();
}

LetGo LocalGroup::WhenAllHaveLeft() const {
  return [all = all_] {
    std::vector<pollfd> ends = all->ends;
    static_cast<void>(poll(ends.data(), ends.size(), 0));
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const bool has_ended = (ends[i].revents & POLLIN) != 0;
      if (!has_ended && !HeadOf(*all->members[i].session).left.load()) return false;
    }
    return true;
  };
}

bool LocalGroup::SeesProcesses() const {
  return std::ranges::any_of(all_->ends, [](const pollfd& one) { return one.fd >= 0; });
}

Status LocalGroup::CheckPeers() const {
  std::vector<pollfd> ends = all_->ends;
  if (poll(ends.data(), ends.size(), 0) <= 0) return Status::Ok();
  const auto ended =
      std::ranges::find_if(ends, [](const pollfd& one) { return (one.revents & POLLIN) != 0; });
  if (ended == ends.end()) return Status::Ok();
  const Member& member = members()[static_cast<std::size_t>(ended - ends.begin())];
  return {StatusCode::kPeerLost,
          "rank " + std::to_string(member.rank) + " is lost: its process, " +
              std::to_string(member.process) + ", has ended",
          {member.rank, {}, {}}};
}

}  // namespace sirtaki::ops::shm
