#include "ops/between_hosts/hierarchy.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <numeric>
#include <utility>

#include "core/threads/cooling_sleep.h"
#include "ops/base/finished.h"
#include "ops/base/keep_forever.h"
#include "ops/base/kernels.h"
#include "ops/base/set_numbers.h"
#include "ops/groups/reduction_terms.h"

namespace sirtaki::ops {

using core::DType;
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

constexpr std::int64_t kLineBytes = 64;

constexpr auto kLongestSleep = std::chrono::milliseconds(1);

}  // namespace

Hierarchy::Hierarchy(Backend& flat, HierarchyOptions options)
    : flat_(flat), options_(std::move(options)) {}

Hierarchy::Layout Hierarchy::LayoutOf(SetNumber set, const RankRanges& members) const {
  const auto host_of = [this](int rank) {
    return options_.host_of_rank[static_cast<std::size_t>(rank)];
  };
  std::map<int, std::vector<int>> by_host;
  for (const int rank : members.ToVector()) by_host[host_of(rank)].push_back(rank);
  Layout layout;
  for (const int rank : by_host[host_of(options_.rank)]) layout.here.Add(rank);
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
  HostMembers& hosts = layout.hosts;
  std::map<int, std::size_t> index;  // of each host
  for (const auto& [host, ranks] : by_host) {
    index[host] = hosts.members.size();
    hosts.members.emplace_back();
    for (const int rank : ranks) {
      hosts.members.back().push_back(static_cast<std::size_t>(members.IndexOf(rank)));
    }
    for (std::size_t slice = 0; slice < least; ++slice) layout.carriers[slice].Add(ranks[slice]);
  }
  for (const RankRanges& carriers : layout.carriers) {
    hosts.at_carrier.emplace_back();
    for (const int rank : carriers.ToVector())
      hosts.at_carrier.back().push_back(index[host_of(rank)]);
  }
  hosts.here = index[host_of(options_.rank)];
  hosts.self = static_cast<std::size_t>(members.IndexOf(options_.rank));
  SetChunks(&layout);
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
    KeepUntil(flat_.WhenLetGo({set, fusion::Lane::kSmall}), told);  // it may still be written to
  }
  return status;
}

void Hierarchy::SetChunks(Layout* layout) const {
  const auto lines = [](std::int64_t bytes) { return core::RoundUp(bytes, kLineBytes); };
  const auto hosts = static_cast<std::int64_t>(layout->hosts.members.size());
  const std::int64_t most = std::max<std::int64_t>(options_.chunk_bytes, 1);
  const std::int64_t exchanged = layout->hosts.slices() * kExchangeBytes;
  layout->chunk_bytes = lines(hosts == 2 ? std::min(most, exchanged) : most);
  // Each window of a vector has a whole line at least.
  layout->parts_bytes = std::max(lines(std::min(most, hosts * exchanged)), hosts * kLineBytes);
}

Status Hierarchy::MakeStage(SetNumber set, const RankRanges& members, const Layout& layout,
                            std::shared_ptr<HostStage>* stage) {
  const RankRanges& here = layout.here;
  const std::int64_t chunk_bytes = std::max(layout.chunk_bytes, layout.parts_bytes);
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
  auto layout = std::make_shared<const Layout>(LayoutOf(set, members));
  if (layout->carriers.empty()) return Status::Ok();
  std::shared_ptr<HostStage> stage;
  Status status = MakeStage(set, members, *layout, &stage);
  if (!status.ok() || stage == nullptr) return status;
  for (std::size_t slice = 0; slice < layout->carriers.size() && status.ok(); ++slice) {
    const RankRanges& carriers = layout->carriers[slice];
    if (!carriers.Contains(options_.rank)) continue;
    status = flat_.AddSet(CarriersOf(set, slice), carriers);
  }
  if (!status.ok()) return status;
  core::MutexLock lock(mutex_);
  sets_[set] = {std::move(stage), std::move(layout)};
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
  if (self >= gone.layout->hosts.slices()) return Status::Ok();
  return flat_.RemoveSet(CarriersOf(set, static_cast<std::size_t>(self)));
}

bool Hierarchy::Covers(Channel channel) const {
  if (channel.lane != fusion::Lane::kLarge) return false;
  core::MutexLock lock(mutex_);
  return sets_.count(channel.set) != 0;
}

std::unique_ptr<Completion> Hierarchy::AllReduce(Channel channel, void* buffer, std::int64_t count,
                                                 core::DType dtype, core::ReduceOp op,
                                                 fusion::Scale after) {
  const Segment segment{buffer, buffer, count};
  return AllReduceSegments(channel, {&segment, 1}, {.dtype = dtype, .op = op, .after = after});
}

std::unique_ptr<Completion> Hierarchy::AllReduceSegments(Channel channel,
                                                         std::span<const Segment> segments,
                                                         const SegmentReduction& how) {
  const Set set = SetOf(channel);
  const DType moved = fusion::AccumulationType(how.dtype, how.op);
  HostWork work{.op = Combining(how.op), .before = how.before, .after = how.after};
  work.vectors.emplace_back(how.dtype, moved, std::vector(segments.begin(), segments.end()),
                            fusion::Cutting{.chunk_bytes = set.layout->chunk_bytes},
                            IdentityOf(how.op, moved));
  return Run(set, work,
             [this, op = work.op, across = Across(channel, set)](
                 std::byte* memory, std::span<const std::int64_t> counts, DType dtype) {
               return flat_.AllReduce(across, memory, counts.front(), dtype, op, {});
             });
}

std::unique_ptr<Completion> Hierarchy::ReduceScatter(Channel channel, void* buffer,
                                                     std::span<const std::int64_t> counts,
                                                     DType dtype, core::ReduceOp op) {
  const Set set = SetOf(channel);
  const auto segment_of = [](std::byte* part, bool own) {
    return Segment{.input = part, .output = own ? part : nullptr};
  };
  HostWork work{.vectors = VectorsOf(*set.layout, dtype, buffer, counts, segment_of), .op = op};
  return Run(set, work,
             [this, op, across = Across(channel, set)](
                 std::byte* memory, std::span<const std::int64_t> of_hosts, DType moved) {
               return flat_.ReduceScatter(across, memory, of_hosts, moved, op);
             });
}

std::unique_ptr<Completion> Hierarchy::AllGather(Channel channel, const void* input, void* output,
                                                 std::int64_t bytes) {
  std::size_t members = 0;
  for (const auto& host : SetOf(channel).layout->hosts.members) members += host.size();
  return AllGatherV(channel, input, output, std::vector<std::int64_t>(members, bytes));
}

std::unique_ptr<Completion> Hierarchy::AllGatherV(Channel channel, const void* input, void* output,
                                                  std::span<const std::int64_t> bytes) {
  const Set set = SetOf(channel);
  const auto segment_of = [input](std::byte* part, bool own) {
    return own ? Segment{.input = input, .output = part == input ? nullptr : part}
               : Segment{.output = part};
  };
  HostWork work{.vectors = VectorsOf(*set.layout, DType::kU8, output, bytes, segment_of),
                .gathers = true};
  // A rank that carries nothing has no place.
  const std::size_t slice = static_cast<std::size_t>(set.stage->self());
  std::size_t place = 0;
  const auto& at_carrier = set.layout->hosts.at_carrier;
  while (slice < at_carrier.size() && at_carrier[slice][place] != set.layout->hosts.here) ++place;
  return Run(set, work,
             [this, place, across = Across(channel, set)](
                 std::byte* memory, std::span<const std::int64_t> of_hosts, DType) {
               const auto own = of_hosts.begin() + static_cast<std::ptrdiff_t>(place);
               return flat_.AllGatherV(
                   across, memory + std::accumulate(of_hosts.begin(), own, std::int64_t{0}), memory,
                   of_hosts);
             });
}

std::unique_ptr<Completion> Hierarchy::Run(const Set& set, const HostWork& work,
                                           const Crossing& crossing) {
  if (stop_.raised()) return Finished::With(stop_.why());
  return Finished::With(RunByHosts(options_.spin, *set.stage, set.layout->hosts, work, crossing,
                                   stop_,
                                   flat_.WhenLetGo({core::kWorldSet, fusion::Lane::kSmall})));
}

Hierarchy::Set Hierarchy::SetOf(Channel channel) const {
  core::MutexLock lock(mutex_);
  return sets_.find(channel.set)->second;
}

Channel Hierarchy::Across(Channel channel, const Set& which) const {
  return {CarriersOf(channel.set, static_cast<std::size_t>(which.stage->self())),
          fusion::Lane::kSmall};
}

std::vector<fusion::FusedVector> Hierarchy::VectorsOf(
    const Layout& layout, DType dtype, void* buffer, std::span<const std::int64_t> counts,
    const std::function<Segment(std::byte* part, bool own)>& segment_of) {
  const HostMembers& hosts = layout.hosts;
  std::vector<std::int64_t> begins(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), std::int64_t{0});
  const auto of_each = static_cast<std::int64_t>(hosts.members.size());
  const fusion::Cutting cutting{.chunk_bytes = layout.parts_bytes / of_each};
  std::vector<fusion::FusedVector> vectors;
  for (const std::vector<std::size_t>& members : hosts.members) {
    std::vector<Segment> segments;
    for (const std::size_t m : members) {
      std::byte* const part = static_cast<std::byte*>(buffer) + begins[m] * BytesOf(dtype);
      segments.push_back(segment_of(part, m == hosts.self));
      segments.back().count = counts[m];
    }
    vectors.emplace_back(dtype, dtype, std::move(segments), cutting, std::nullopt);
  }
  return vectors;
}

void Hierarchy::Abort(const Status& why) { stop_.Raise(why); }

}  // namespace sirtaki::ops
