#include "ops/hierarchy.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>

#include "ops/finished.h"

namespace sirtaki::ops {

using core::RankRanges;
using core::SetNumber;
using core::Status;
using core::StatusCode;

namespace {

// The carriers of a slice are a set of the medium with a number of its own, far from those that
// the session gives.
constexpr SetNumber kFirstCarriers = SetNumber{1} << 31;
constexpr SetNumber kMaxSlices = 256;
constexpr SetNumber kMaxSets = kFirstCarriers / kMaxSlices;

SetNumber CarriersOf(SetNumber set, std::size_t slice) {
  return kFirstCarriers + set * kMaxSlices + static_cast<SetNumber>(slice);
}

// Asking for the peers' lives costs a system call for each.
constexpr auto kLookAtPeers = std::chrono::milliseconds(100);

}  // namespace

Hierarchy::Hierarchy(Backend& flat, shm::LocalGroup* group, HierarchyOptions options)
    : flat_(flat),
      group_(group),
      options_(std::move(options)),
      chunk_bytes_((std::max<std::int64_t>(options_.chunk_bytes, 1) + 63) / 64 * 64) {}

Hierarchy::Layout Hierarchy::LayoutOf(SetNumber set, const RankRanges& members) const {
  std::map<int, std::vector<int>> by_host;
  for (const int rank : members.ToVector()) {
    by_host[options_.host_of_rank[static_cast<std::size_t>(rank)]].push_back(rank);
  }
  Layout layout;
  for (const int rank : by_host[options_.host_of_rank[static_cast<std::size_t>(options_.rank)]]) {
    layout.here.Add(rank);
  }
  std::size_t least = kMaxSlices;
  std::size_t most = 0;
  bool all_share = true;
  for (const auto& [host, ranks] : by_host) {
    least = std::min(least, ranks.size());
    most = std::max(most, ranks.size());
    all_share &= ranks.size() == 1 || options_.shares[static_cast<std::size_t>(host)];
  }
  if (by_host.size() < 2 || most < 2 || !all_share || set >= kMaxSets) return layout;
  layout.carriers.resize(least);
  for (const auto& [host, ranks] : by_host) {
    for (std::size_t slice = 0; slice < least; ++slice) layout.carriers[slice].Add(ranks[slice]);
  }
  return layout;
}

template <typename T>
Status Hierarchy::Tell(SetNumber set, const T& mine, std::vector<T>* all) {
  const auto operation =
      flat_.AllGather({set, fusion::Lane::kLarge}, &mine, all->data(), sizeof(T));
  while (!operation->Poll()) {
    if (Status stopped = Stopped(); !stopped.ok()) return stopped;
    std::this_thread::yield();
  }
  return operation->status();
}

Status Hierarchy::MakeStage(SetNumber set, const RankRanges& members, const RankRanges& here,
                            std::shared_ptr<HostStage>* stage) {
  const std::int64_t bytes = HostStage::MemoryBytes(chunk_bytes_);
  std::shared_ptr<shm::Region> mine;
  Status made = shm::Region::Create("sirtaki hierarchy", bytes, &mine);
  std::vector<Place> places(static_cast<std::size_t>(members.Count()));
  Status status = Tell(set, Place{getpid(), made.ok() ? mine->descriptor() : -1}, &places);
  if (!status.ok()) return status;
  std::vector<std::shared_ptr<shm::Region>> memory;
  for (const int rank : here.ToVector()) {
    const Place& place = places[static_cast<std::size_t>(members.IndexOf(rank))];
    std::shared_ptr<shm::Region> region;
    if (rank == options_.rank) {
      region = mine;
    } else if (made.ok()) {
      made = shm::Region::Open(static_cast<pid_t>(place.process),
                               static_cast<int>(place.descriptor), bytes, &region);
    }
    memory.push_back(std::move(region));
  }
  // Afterwards all have opened what they need, or all know that one could not.
  std::vector<std::uint8_t> opened(places.size());
  status = Tell(set, static_cast<std::uint8_t>(made.ok()), &opened);
  if (status.ok() && std::find(opened.begin(), opened.end(), 0) == opened.end()) {
    *stage = std::make_shared<HostStage>(
        std::move(memory), static_cast<int>(here.IndexOf(options_.rank)), chunk_bytes_);
  }
  return status;
}

Status Hierarchy::AddSet(SetNumber set, const RankRanges& members) {
  if (!members.Contains(options_.rank)) return Status::Ok();
  const Layout layout = LayoutOf(set, members);
  if (layout.carriers.empty()) return Status::Ok();
  std::shared_ptr<HostStage> stage;
  Status status = MakeStage(set, members, layout.here, &stage);
  if (!status.ok() || stage == nullptr) return status;
  for (std::size_t slice = 0; slice < layout.carriers.size() && status.ok(); ++slice) {
    if (!layout.carriers[slice].Contains(options_.rank)) continue;
    status = flat_.AddSet(CarriersOf(set, slice), layout.carriers[slice]);
  }
  if (!status.ok()) return status;
  core::MutexLock lock(mutex_);
  sets_[set] = {std::move(stage), static_cast<int>(layout.carriers.size())};
  return status;
}

Status Hierarchy::RemoveSet(SetNumber set) {
  Set gone;
  {
    core::MutexLock lock(mutex_);
    const auto found = sets_.find(set);
    if (found == sets_.end()) return Status::Ok();
    gone = std::move(found->second);
    sets_.erase(found);
  }
  // The others keep what they have mapped for as long as they read it.
  const int self = gone.stage->self();
  if (self >= gone.slices) return Status::Ok();
  return flat_.RemoveSet(CarriersOf(set, static_cast<std::size_t>(self)));
}

bool Hierarchy::Covers(Channel channel) const {
  if (channel.lane != fusion::Lane::kLarge) return false;
  core::MutexLock lock(mutex_);
  return sets_.count(channel.set) != 0;
}

std::unique_ptr<Completion> Hierarchy::AllReduce(Channel channel, void* buffer, std::int64_t count,
                                                 core::DType dtype, core::ReduceOp op) {
  const Segment segment{buffer, buffer, count};
  return AllReduceSegments(channel, {&segment, 1}, {.dtype = dtype, .op = op});
}

std::unique_ptr<Completion> Hierarchy::AllReduceSegments(Channel channel,
                                                         std::span<const Segment> segments,
                                                         const SegmentReduction& how) {
  if (Status stop = Check(); !stop.ok()) return Finished::With(std::move(stop));
  Set set;
  {
    core::MutexLock lock(mutex_);
    set = sets_.find(channel.set)->second;
  }
  const Channel across{CarriersOf(channel.set, static_cast<std::size_t>(set.stage->self())),
                       fusion::Lane::kLarge};
  return std::make_unique<HierarchicalRun>(
      options_.run, set.stage, set.slices, segments, how,
      [this, across](void* memory, std::int64_t count, core::DType dtype, core::ReduceOp op) {
        return flat_.AllReduce(across, memory, count, dtype, op);
      },
      [this] { return Check(); });
}

Status Hierarchy::Stopped() const {
  core::MutexLock lock(mutex_);
  return stopped_;
}

Status Hierarchy::Check() {
  if (Status stopped = Stopped(); !stopped.ok()) return stopped;
  const core::TimePoint now = core::Clock::now();
  if (group_ == nullptr || now - looked_ < kLookAtPeers) return Status::Ok();
  looked_ = now;
  return group_->CheckPeers();
}

void Hierarchy::Abort(const Status& why) {
  core::MutexLock lock(mutex_);
  if (stopped_.ok()) stopped_ = why.ok() ? Status(StatusCode::kAborted, "aborted") : why;
}

}  // namespace sirtaki::ops
