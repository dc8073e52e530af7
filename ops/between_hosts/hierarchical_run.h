// One all-reduce of a process set that spans hosts, as this rank takes part in it. Chunk by chunk:
//
//   load     every member brings its elements, widened and scaled, to where its host sees them
//   reduce   every member combines its part of the chunk, in the order of the host's members
//   cross    carriers, as many on every host, each reduce a slice of the chunk with their like on
//            the other hosts
//   take     every member scales and rounds all slices into its outputs
//
// A chunk crosses while later ones are loaded and reduced. The carriers of a slice get the same
// bits, and everybody takes theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>

#include "core/base/status.h"
#include "fusion/pack.h"
#include "ops/base/backend.h"
#include "ops/base/bytes.h"
#include "ops/between_hosts/host_stage.h"

namespace sirtaki::ops {

// HierarchicalRun is not thread-safe. Everything that is given by reference must outlive it.
class HierarchicalRun {
 public:
  // Reduces a carrier's slice with those of the other hosts' carriers, in place. Any number may be
  // under way; all carriers start theirs in the same order.
  using Crossing = std::function<std::unique_ptr<Completion>(std::byte* memory, std::int64_t count,
                                                             core::DType dtype, core::ReduceOp op)>;

  // Runs through. `spin`: short waits keep their core. `slices`: how many carriers each host has, its
  // first members. `check`: why there is no point in waiting any longer; called now and then.
  HierarchicalRun(bool spin, std::shared_ptr<HostStage> stage, int slices,
                  std::span<const Segment> segments, const SegmentReduction& how, Crossing crossing,
                  std::function<core::Status()> check);
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

  const fusion::Window& WindowOf(std::uint32_t chunk) const;
  // The i-th of `parts` nearly equal parts of a chunk.
  Part PartOf(std::uint32_t chunk, int i, int parts) const;
  bool AllReached(shm::SharedCounter HostStageCounters::*counter, int members,
                  std::uint32_t value) const;
  HostStageCounters& mine() const { return stage_->counters(stage_->self()); }
  bool carries() const { return stage_->self() < slices_; }

  const bool spin_;
  const std::shared_ptr<HostStage> stage_;
  const int slices_;
  const fusion::FusedVector vector_;
  const core::ReduceOp op_;
  const fusion::Scale before_;
  const fusion::Scale after_;
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
