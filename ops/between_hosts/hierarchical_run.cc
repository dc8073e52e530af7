#include "ops/between_hosts/hierarchical_run.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "ops/base/bytes.h"
#include "ops/base/keep_forever.h"
#include "ops/base/kernels.h"

namespace sirtaki::ops {
namespace {

using core::Status;

// Waiting keeps its core for so long, then gives it away, then sleeps.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kYield = std::chrono::microseconds(200);
// Nothing rings for what crosses, or for a stop. What crosses goes on without this rank, and yielding
// would take the core from what brings it.
constexpr auto kNapWhileCrossing = std::chrono::microseconds(100);
constexpr auto kNap = std::chrono::milliseconds(50);

std::uint32_t ChunksOf(const HostWork& work) {
  std::size_t most = 0;
  for (const auto& vector : work.vectors) most = std::max(most, vector.windows().size());
  return static_cast<std::uint32_t>(most);
}

class HierarchicalRun {
 public:
  HierarchicalRun(bool spin, HostStage& stage, const HostMembers& hosts, const HostWork& work,
                  const Crossing& crossing, const StopSign& stop, LetGo let_go)
      : spin_(spin),
        stage_(stage),
        hosts_(hosts),
        work_(work),
        crossing_(crossing),
        stop_(stop),
        let_go_(std::move(let_go)),
        begin_(stage.chunks()),
        end_(begin_ + ChunksOf(work)) {
    stage_.EndOperation(end_ - begin_);
  }
  // What crosses unfinished may keep its memory: after an error too the medium may still be at it.
  ~HierarchicalRun() {
    const bool lost = std::any_of(under_way_.begin(), under_way_.end(), [](const auto& slice) {
      return slice != nullptr && (!slice->Poll() || !slice->status().ok());
    });
    under_way_.clear();
    if (lost) KeepUntil(let_go_, stage_.memory());
  }
  HierarchicalRun(const HierarchicalRun&) = delete;
  HierarchicalRun& operator=(const HierarchicalRun&) = delete;

  Status RunThrough() {
    while (taken_ != end_ && status_.ok()) {
      const std::uint32_t rung = mine().bell.Load();
      if (!Advance() && status_.ok()) Wait(rung);
    }
    return status_;
  }

 private:
  bool Advance();  // true if anything moved
  bool Load();
  bool Reduce();
  bool StartCrossing();
  bool PollCrossings();
  bool EndCrossings();
  bool Take();
  void Wait(std::uint32_t rung);

  // Returns a vector's window in a chunk; an empty one where only longer vectors have a window.
  fusion::Window WindowOf(std::uint32_t chunk, std::size_t vector) const;
  // The elements of the vectors before this one in a chunk.
  std::int64_t LoadedBefore(std::uint32_t chunk, std::size_t vector) const;
  std::int64_t element_bytes() const { return BytesOf(work_.vectors.front().moved()); }
  // Calls `function(vector, window, slice, at)` for each vector: which part of its window is in this
  // carrier's slice, and how many elements of the slice lie before it.
  template <typename Function>
  void ForEachInSlice(std::uint32_t chunk, int carrier, Function function) const;
  void LoadOwn();  // of a gather
  bool AllReached(shm::SharedCounter HostStageCounters::*counter, int members,
                  std::uint32_t value) const;
  HostStageCounters& mine() const { return stage_.counters(stage_.self()); }
  bool carries() const { return stage_.self() < hosts_.slices(); }

  const bool spin_;
  HostStage& stage_;
  const HostMembers& hosts_;
  const HostWork& work_;
  const Crossing& crossing_;
  const StopSign& stop_;
  const LetGo let_go_;

  // Chunks, counted over all operations of the set.
  const std::uint32_t begin_;
  const std::uint32_t end_;
  std::uint32_t loaded_ = begin_;
  std::uint32_t reduced_ = begin_;
  std::uint32_t sent_ = begin_;  // across; those that have not crossed yet are under way
  std::uint32_t crossed_ = begin_;
  std::uint32_t taken_ = begin_;
  std::deque<std::unique_ptr<Completion>> under_way_;  // null: an empty slice
  Status status_;  // not ok: a crossing has failed, or there is no point in waiting
};

// Wait sleeps until a peer has come further, or for a while.
void HierarchicalRun::Wait(std::uint32_t rung) {
  status_ = stop_.why();
  if (!status_.ok()) return;
  const bool crosses = !under_way_.empty();
  const core::Duration spin = spin_ ? kSpin : core::Duration();
  const core::Duration awake = crosses ? spin : kYield;
  const core::TimePoint start = core::Clock::now();
  for (core::TimePoint now = start; now - start < awake; now = core::Clock::now()) {
    if (mine().bell.Load() != rung) return;
    if (crosses && PollCrossings()) return;
    if (now - start >= spin) std::this_thread::yield();
  }
  mine().bell.Sleep(rung, core::Clock::now() + (crosses ? kNapWhileCrossing : kNap));
}

bool HierarchicalRun::Advance() {
  bool moved = EndCrossings();
  if (!status_.ok()) return moved;
  moved |= StartCrossing();
  moved |= Load();
  moved |= Reduce();
  moved |= Take();
  return moved;
}

bool HierarchicalRun::Load() {
  if (loaded_ == end_) return false;
  // Everybody has taken what was in this chunk's place.
  if (!AllReached(&HostStageCounters::taken, stage_.size(), loaded_ + 1 - HostStage::kSlots)) {
    return false;
  }
  if (work_.gathers) {
    LoadOwn();
    stage_.Publish(mine().loaded, ++loaded_);
    stage_.Publish(mine().reduced, ++reduced_);
    return true;
  }
  if (stage_.size() == 1) {  // then it is reduced already
    ForEachInSlice(loaded_, 0, [&](std::size_t v, const fusion::Window& window, Part, auto at) {
      work_.vectors[v].LoadInto(window, stage_.Reduced(0, loaded_) + at * element_bytes(),
                                work_.before);
    });
  } else {
    std::byte* to = stage_.Loaded(stage_.self(), loaded_);
    for (std::size_t v = 0; v < work_.vectors.size(); ++v) {
      const fusion::Window window = WindowOf(loaded_, v);
      work_.vectors[v].LoadInto(window, to, work_.before);
      to += window.count * element_bytes();
    }
  }
  stage_.Publish(mine().loaded, ++loaded_);
  return true;
}

// The others of this host load what is between.
void HierarchicalRun::LoadOwn() {
  for (int carrier = 0; carrier < hosts_.slices(); ++carrier) {
    ForEachInSlice(
        loaded_, carrier, [&](std::size_t v, const fusion::Window& window, Part slice, auto at) {
          if (v != hosts_.here) return;
          work_.vectors[v].LoadInto({.begin = window.begin + slice.begin, .count = slice.count},
                                    stage_.Reduced(carrier, loaded_) + at * element_bytes());
        });
  }
}

bool HierarchicalRun::Reduce() {
  if (reduced_ == loaded_ || !AllReached(&HostStageCounters::loaded, stage_.size(), reduced_ + 1)) {
    return false;
  }
  const std::int64_t size = element_bytes();
  for (int carrier = 0; carrier < hosts_.slices() && stage_.size() > 1; ++carrier) {
    ForEachInSlice(reduced_, carrier,
                   [&](std::size_t v, const fusion::Window& window, Part slice, std::int64_t at) {
                     const Part part = PartOf(window.count, size, stage_.self(), stage_.size());
                     const std::int64_t from = std::max(part.begin, slice.begin);
                     const std::int64_t count =
                         std::min(part.begin + part.count, slice.begin + slice.count) - from;
                     if (count <= 0) return;
                     std::byte* const to =
                         stage_.Reduced(carrier, reduced_) + (at + from - slice.begin) * size;
                     const std::int64_t loaded = (LoadedBefore(reduced_, v) + from) * size;
                     Copy(to, stage_.Loaded(0, reduced_) + loaded, count * size);
                     for (int member = 1; member < stage_.size(); ++member) {
                       ReduceInto(work_.op, work_.vectors[v].moved(), to,
                                  stage_.Loaded(member, reduced_) + loaded, count);
                     }
                   });
  }
  stage_.Publish(mine().reduced, ++reduced_);
  return true;
}

bool HierarchicalRun::StartCrossing() {
  if (!carries() || sent_ == end_) return false;
  if (!AllReached(&HostStageCounters::reduced, stage_.size(), sent_ + 1)) return false;
  std::vector<std::int64_t> counts;
  std::int64_t all = 0;
  ForEachInSlice(sent_, stage_.self(), [&](std::size_t, const fusion::Window&, Part slice, auto) {
    counts.push_back(slice.count);
    all += slice.count;
  });
  // All carriers of an empty slice know that it is.
  under_way_.push_back(all == 0 ? nullptr
                                : crossing_(stage_.Reduced(stage_.self(), sent_), counts,
                                            work_.vectors.front().moved()));
  ++sent_;
  EndCrossings();
  return true;
}

// All of them, since each may have several steps. Whether the oldest is over.
bool HierarchicalRun::PollCrossings() {
  for (const auto& slice : under_way_) {
    if (slice != nullptr) slice->Poll();
  }
  return under_way_.front() == nullptr || under_way_.front()->Poll();
}

bool HierarchicalRun::EndCrossings() {
  const std::uint32_t before = crossed_;
  if (!under_way_.empty()) PollCrossings();
  while (!under_way_.empty()) {
    Completion* const slice = under_way_.front().get();
    if (slice != nullptr && !slice->Poll()) break;
    if (slice != nullptr && !slice->status().ok()) {
      status_ = slice->status();
      return true;
    }
    under_way_.pop_front();
    stage_.Publish(mine().crossed, ++crossed_);
  }
  return crossed_ != before;
}

bool HierarchicalRun::Take() {
  if (taken_ == loaded_ || !AllReached(&HostStageCounters::crossed, hosts_.slices(), taken_ + 1)) {
    return false;
  }
  for (int carrier = 0; carrier < hosts_.slices(); ++carrier) {
    ForEachInSlice(
        taken_, carrier, [&](std::size_t v, const fusion::Window& window, Part slice, auto at) {
          if (slice.count == 0) return;
          work_.vectors[v].StoreFrom({.begin = window.begin + slice.begin, .count = slice.count},
                                     stage_.Reduced(carrier, taken_) + at * element_bytes(),
                                     work_.after);
        });
  }
  stage_.Publish(mine().taken, ++taken_);
  return true;
}

fusion::Window HierarchicalRun::WindowOf(std::uint32_t chunk, std::size_t vector) const {
  const std::vector<fusion::Window>& windows = work_.vectors[vector].windows();
  const std::size_t number = chunk - begin_;
  return number < windows.size() ? windows[number] : fusion::Window();
}

std::int64_t HierarchicalRun::LoadedBefore(std::uint32_t chunk, std::size_t vector) const {
  std::int64_t before = 0;
  for (std::size_t v = 0; v < vector; ++v) before += WindowOf(chunk, v).count;
  return before;
}

template <typename Function>
void HierarchicalRun::ForEachInSlice(std::uint32_t chunk, int carrier, Function function) const {
  std::int64_t at = 0;
  for (std::size_t i = 0; i < work_.vectors.size(); ++i) {
    const std::size_t v =
        work_.vectors.size() == 1 ? 0 : hosts_.at_carrier[static_cast<std::size_t>(carrier)][i];
    const fusion::Window window = WindowOf(chunk, v);
    const Part slice = PartOf(window.count, element_bytes(), carrier, hosts_.slices());
    function(v, window, slice, at);
    at += slice.count;
  }
}

bool HierarchicalRun::AllReached(shm::SharedCounter HostStageCounters::*counter, int members,
                                 std::uint32_t value) const {
  for (int member = 0; member < members; ++member) {
    if (!shm::Reached((stage_.counters(member).*counter).Load(), value)) return false;
  }
  return true;
}

}  // namespace

Status RunByHosts(bool spin, HostStage& stage, const HostMembers& hosts, const HostWork& work,
                  const Crossing& crossing, const StopSign& stop, LetGo let_go) {
  return HierarchicalRun(spin, stage, hosts, work, crossing, stop, std::move(let_go)).RunThrough();
}

}  // namespace sirtaki::ops
