// All-reduce, reduce-scatter and all-gather for process sets that span hosts: within each host first,
// over memory that its ranks share; then each of a few carriers on every host takes a slice across.
// So a host's ranks use its network together, and each element crosses it once each way, however many
// ranks there are; in a reduce-scatter and an all-gather one way.
//
// A slice crosses by the medium's own backend: the carriers of a slice, one on each host,
// are a process set there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/thread_annotations.h"
#include "ops/base/backend.h"
#include "ops/base/stop_sign.h"
#include "ops/between_hosts/hierarchical_run.h"

namespace sirtaki::ops {

struct HierarchyOptions {
  int rank = 0;
  std::vector<int> host_of_rank;
  std::vector<bool> shares;  // by host: whether its ranks share memory; the same on all ranks
  bool spin = true;          // short waits keep their core
  std::int64_t chunk_bytes = std::int64_t{1} << 20;   // the most that is loaded at a time
  core::TimePoint start_by = core::TimePoint::max();  // of the world's AddSet
};

// A hierarchy is one rank's. Sets come and go, and operations run, on the large lane; Abort is
// called by anyone.
class Hierarchy final : public Rootless {
 public:
  // `flat`: the medium's, which must outlive it.
  Hierarchy(Backend& flat, HierarchyOptions options);
  Hierarchy(const Hierarchy&) = delete;
  Hierarchy& operator=(const Hierarchy&) = delete;

  // AddSet is called by all members of a set that `flat` has, each after its AddSet there; of the
  // world before anything else. Blocks until all are there. Makes nothing for sets that are better
  // off without.
  core::Status AddSet(core::SetNumber set, const core::RankRanges& members)
      SIRTAKI_EXCLUDES(mutex_);
  // Before RemoveSet of `flat`.
  core::Status RemoveSet(core::SetNumber set) SIRTAKI_EXCLUDES(mutex_);

  // Whether operations of this channel go this way: the same on all members.
  bool Covers(Channel channel) const SIRTAKI_EXCLUDES(mutex_);

  std::string_view name() const override { return "by hosts"; }
  // What is shared is staged: of a rank's own memory others see nothing.
  LetGo WhenLetGo(Channel channel) const override { return flat_.WhenLetGo(channel); }
  // Precondition of these: Covers(channel).
  std::unique_ptr<Completion> AllReduce(Channel channel, void* buffer, std::int64_t count,
                                        core::DType dtype, core::ReduceOp op,
                                        fusion::Scale after) override;
  std::unique_ptr<Completion> AllGather(Channel channel, const void* input, void* output,
                                        std::int64_t bytes) override SIRTAKI_EXCLUDES(mutex_);
  std::unique_ptr<Completion> AllGatherV(Channel channel, const void* input, void* output,
                                         std::span<const std::int64_t> bytes) override
      SIRTAKI_EXCLUDES(mutex_);
  bool ReducesSegments(const SegmentReduction& /*how*/) const override { return true; }
  std::unique_ptr<Completion> AllReduceSegments(Channel channel, std::span<const Segment> segments,
                                                const SegmentReduction& how) override
      SIRTAKI_EXCLUDES(mutex_);
  bool ReducesParts(Channel /*channel*/) const override { return true; }
  std::unique_ptr<Completion> ReduceScatter(Channel channel, void* buffer,
                                            std::span<const std::int64_t> counts, core::DType dtype,
                                            core::ReduceOp op) override SIRTAKI_EXCLUDES(mutex_);

  void Abort(const core::Status& why) SIRTAKI_EXCLUDES(mutex_);

 private:
  // The members of a set by host, and what follows.
  struct Layout {
    core::RankRanges here;                   // those of this host
    std::vector<core::RankRanges> carriers;  // by slice; none: the set is left to the medium
    HostMembers hosts;
    // The most of a chunk, of an operation with one vector and with one for each host.
    std::int64_t chunk_bytes = 0;
    std::int64_t parts_bytes = 0;
  };
  struct Set {
    std::shared_ptr<HostStage> stage;
    std::shared_ptr<const Layout> layout;
  };
  // Where the others find a member's part of the stage.
  struct Place {
    std::int64_t process = 0;
    std::int64_t descriptor = 0;
  };

  Layout LayoutOf(core::SetNumber set, const core::RankRanges& members) const;
  // Collective over the set. Null on all members if there is no memory for it somewhere.
  core::Status MakeStage(core::SetNumber set, const core::RankRanges& members, const Layout& layout,
                         std::shared_ptr<HostStage>* stage);
  void SetChunks(Layout* layout) const;
  // Every member's, by member.
  template <typename T>
  core::Status Tell(core::SetNumber set, const T& mine, std::vector<T>* all);
  Set SetOf(Channel channel) const SIRTAKI_EXCLUDES(mutex_);
  // The channel of this rank's slice.
  Channel Across(Channel channel, const Set& which) const;
  // A vector for each host, of its members' parts of a buffer: `counts[i]` elements of member i, one
  // after the other. `segment_of(part, own)`: what this rank gives and gets of a part.
  static std::vector<fusion::FusedVector> VectorsOf(
      const Layout& layout, core::DType dtype, void* buffer, std::span<const std::int64_t> counts,
      const std::function<Segment(std::byte* part, bool own)>& segment_of);
  std::unique_ptr<Completion> Run(const Set& set, const HostWork& work, const Crossing& crossing)
      SIRTAKI_EXCLUDES(mutex_);

  Backend& flat_;
  const HierarchyOptions options_;
  mutable core::Mutex mutex_;
  std::map<core::SetNumber, Set> sets_ SIRTAKI_GUARDED_BY(mutex_);
  StopSign stop_;
};

}  // namespace sirtaki::ops
