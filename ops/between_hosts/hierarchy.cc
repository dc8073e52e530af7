#include "ops/between_hosts/hierarchy.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

#include "core/threads/cooling_sleep.h"
#include "ops/base/finished.h"
#include "ops/base/keep_forever.h"
#include "ops/base/set_numbers.h"

namespace sirtaki::ops {

using core::RankRanges;
using core::SetNumber;
using core::Status;
using core::StatusCode;

namespace {

SetNumber CarriersOf(SetNumber set, std::size_t slice) {
  return SetBeside(SetKind::kCarriers, set, slice);
}

// Two hosts' carriers exchange so much at a time: several are under way, so smaller ones fill the
// network from the beginning to the end (docs/decisions/0008).
constexpr std::int64_t kExchangeBytes = std::int64_t{128} << 10;

constexpr auto kLongestSleep = std::chrono::milliseconds(1);

// Asking for the peers' lives costs a system call for each.
constexpr auto kLookAtPeers = std::chrono::milliseconds(100);

}  // namespace

Hierarchy::Hierarchy(Backend& flat, shm::LocalGroup* group, HierarchyOptions options)
    : flat_(flat), group_(group), options_(std::move(options)) {}

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
  if (by_host.size() < 2 || most < 2 || !all_share || set >= kMaxSetWithSlices) return layout;
  layout.carriers.resize(least);
  for (const auto& [host, ranks] : by_host) {
    for (std::size_t slice = 0; slice < least; ++slice) layout.carriers[slice].Add(ranks[slice]);
  }
  return layout;
}

template <typename T>
Status Hierarchy::Tell(SetNumber set, const T& mine, std::vector<T>* all) {
  const auto told = std::make_shared<std::vector<T>>(all->size());
  // This runs on the lane that is polled: a member that never comes ends it at the deadline, or by
  // Abort.
  const auto operation =
      flat_.AllGather({set, fusion::Lane::kSmall}, &mine, told->data(), sizeof(T));
  const core::TimePoint deadline =
      set == core::kWorldSet ? options_.start_by : core::TimePoint::max();
  core::CoolingSleep sleep(kLongestSleep);
  Status status;
  while (status.ok() && !operation->Poll()) {
    status = stop_.why();
    if (status.ok() && core::Clock::now() >= deadline) {
      status = {StatusCode::kTimedOut, "not all ranks have told where they share memory in time"};
    }
    sleep.Pause();
  }
  if (status.ok()) status = operation->status();
  if (status.ok()) {
    *all = std::move(*told);
  } else {
    KeepForever(told);  // the medium may still write there
  }
  return status;
}

std::int64_t Hierarchy::ChunkBytes(const Layout& layout) const {
  std::int64_t bytes = std::max<std::int64_t>(options_.chunk_bytes, 1);
  if (layout.carriers[0].Count() == 2) {
    bytes = std::min(bytes, static_cast<std::int64_t>(layout.carriers.size()) * kExchangeBytes);
  }
  return (bytes + 63) / 64 * 64;
}

Status Hierarchy::MakeStage(SetNumber set, const RankRanges& members, const Layout& layout,
                            std::shared_ptr<HostStage>* stage) {
  const RankRanges& here = layout.here;
  const std::int64_t chunk_bytes = ChunkBytes(layout);
  const std::int64_t bytes = HostStage::MemoryBytes(chunk_bytes);
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
        std::move(memory), static_cast<int>(here.IndexOf(options_.rank)), chunk_bytes);
  }
  return status;
}

Status Hierarchy::AddSet(SetNumber set, const RankRanges& members) {
  if (!members.Contains(options_.rank)) return Status::Ok();
  const Layout layout = LayoutOf(set, members);
  if (layout.carriers.empty()) return Status::Ok();
  std::shared_ptr<HostStage> stage;
  Status status = MakeStage(set, members, layout, &stage);
  if (!status.ok() || stage == nullptr) return status;
  Set made{.stage = std::move(stage), .slices = static_cast<int>(layout.carriers.size())};
  for (std::size_t slice = 0; slice < layout.carriers.size() && status.ok(); ++slice) {
    const RankRanges& carriers = layout.carriers[slice];
    if (!carriers.Contains(options_.rank)) continue;
    status = flat_.AddSet(CarriersOf(set, slice), carriers);
  }
  if (!status.ok()) return status;
  core::MutexLock lock(mutex_);
  sets_[set] = std::move(made);
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
  const HierarchicalRun run(options_.spin, set.stage, set.slices, segments, how,
                            CrossingOf(channel.set, set), [this] { return Check(); });
  return Finished::With(run.status());
}

HierarchicalRun::Crossing Hierarchy::CrossingOf(SetNumber set, const Set& which) {
  const Channel across{CarriersOf(set, static_cast<std::size_t>(which.stage->self())),
                       fusion::Lane::kSmall};
  return
      [this, across](std::byte* memory, std::int64_t count, core::DType dtype, core::ReduceOp op) {
        return flat_.AllReduce(across, memory, count, dtype, op);
      };
}

Status Hierarchy::Check() {
  if (stop_.raised()) return stop_.why();
  const core::TimePoint now = core::Clock::now();
  if (group_ == nullptr || now - looked_ < kLookAtPeers) return Status::Ok();
  looked_ = now;
  return group_->CheckPeers();
}

void Hierarchy::Abort(const Status& why) { stop_.Raise(why); }

}  // namespace sirtaki::ops
