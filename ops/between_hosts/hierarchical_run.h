// One operation of a process set that spans hosts, as this rank takes part in it. Chunk by chunk:
//
//   load     every member brings its elements, widened and scaled, to where its host sees them
//   reduce   every member combines its part of the chunk, in the order of the host's members
//   cross    carriers, as many on every host, each take a slice of the chunk across, with their like
//            on the other hosts
//   take     every member scales and rounds what it needs of all slices into its outputs
//
// An all-reduce has one vector, which all hosts reduce. A reduce-scatter and an all-gather have one
// for each host: the elements that its members get, or give. A chunk holds a window of each vector, so
// that every host sends and receives all the time; a gather loads what this rank gives and reduces
// nothing. A chunk crosses while later ones are loaded and reduced. The carriers of a slice get the
// same bits, and everybody takes theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "fusion/pack.h"
#include "ops/base/backend.h"
#include "ops/base/bytes.h"
#include "ops/between_hosts/host_stage.h"

namespace sirtaki::ops {

// What a set that spans hosts looks like; the same on all members but for `here` and `self`.
struct HostMembers {
  std::vector<std::vector<std::size_t>> members;     // of each host, indices among the set's
  std::vector<std::vector<std::size_t>> at_carrier;  // the hosts in the order of a slice's carriers
  std::size_t here = 0;                              // this rank's host
  std::size_t self = 0;                              // this rank among the set's members

  int slices() const { return static_cast<int>(at_carrier.size()); }
};

// What a run moves.
struct HostWork {
  std::vector<fusion::FusedVector> vectors;  // one, or one for each host; of one type
  core::ReduceOp op = core::ReduceOp::kSum;
  fusion::Scale before = {};
  fusion::Scale after = {};
  bool gathers = false;
};

// HierarchicalRun is not thread-safe. Everything that is given by reference must outlive it.
class HierarchicalRun {
 public:
  // Takes a carrier's slice across, in place. `counts`: its elements of each vector, in the order of
  // the slice's carriers. Any number may be under way; all carriers start theirs in the same order.
  using Crossing = std::function<std::unique_ptr<Completion>(
      std::byte* memory, std::span<const std::int64_t> counts, core::DType dtype)>;

  // Runs through. `spin`: short waits keep their core. The carriers of a host are its first members.
  // `check`: why there is no point in waiting any longer; called now and then.
  HierarchicalRun(bool spin, std::shared_ptr<HostStage> stage, const HostMembers& hosts,
                  HostWork work, Crossing crossing, std::function<core::Status()> check);
  // What crosses unfinished keeps its memory.
  ~HierarchicalRun();

  const core::Status& status() const { return status_; }

 private:
  bool Advance();  // true if anything moved
  bool Load();
  bool Reduce();
  bool StartCrossing();
  bool PollCrossings();
  bool EndCrossings();
  bool Take();
  void RunThrough();
  void Wait(std::uint32_t rung);
  void Finish(core::Status status);

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
  HostStageCounters& mine() const { return stage_->counters(stage_->self()); }
  bool carries() const { return stage_->self() < hosts_.slices(); }

  const bool spin_;
  const std::shared_ptr<HostStage> stage_;
  const HostMembers& hosts_;
  const HostWork work_;
  const Crossing crossing_;
  const std::function<core::Status()> check_;

  // Chunks, counted over all operations of the set.
  const std::uint32_t begin_;
  const std::uint32_t end_;
  std::uint32_t loaded_;
  std::uint32_t reduced_;
  std::uint32_t sent_;  // across; those that have not crossed yet are under way
  std::uint32_t crossed_;
  std::uint32_t taken_;
  std::deque<std::unique_ptr<Completion>> under_way_;  // null: an empty slice
  bool finished_ = false;
  core::Status status_;
};

}  // namespace sirtaki::ops
