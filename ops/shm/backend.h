// Collectives in memory that the members share: each member reads the others' tensors where they
// lie, or what they have staged in their session memory.
//
// An operation that reads the members' tensors where they lie ends well only if no member has
// called Abort by then: who has may change its tensors again.
//
// After Abort, and after an operation that failed here, a peer may for a moment go on reading and,
// in reductions on the large lane, writing this rank's tensors where it sees them: it stops at its
// next look at the stop sign, after a megabyte at most, and a peer that has not heard of the fault
// yet when it does. So this memory is kept until no member of the group can touch it any more.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string_view>

#include "core/base/thread_annotations.h"
#include "ops/base/backend.h"
#include "ops/base/stop_sign.h"
#include "ops/shm/blocks.h"
#include "ops/shm/channel.h"
#include "ops/shm/local_group.h"

namespace sirtaki::ops::shm {

struct BackendOptions {
  // Short waits spin; false: they yield, since ranks outnumber cores.
  bool spin = true;
  bool verify = false;                               // see ChannelOptions
  std::int64_t chunk_bytes = std::int64_t{1} << 20;  // of what is staged at a time
  // The members' engines sleep on the bells of the group.
  bool rings = true;
};

class Backend final : public ops::Backend {
 public:
  // The group must outlive the backend and all its operations.
  Backend(LocalGroup& group, const BackendOptions& options);
  ~Backend() override;

  // Whether all these ranks are in the group.
  bool Covers(const core::RankRanges& members) const;

  std::string_view name() const override { return "shm"; }
  LetGo WhenLetGo(Channel channel) const override;
  // The set is one that Covers.
  core::Status AddSet(core::SetNumber set, const core::RankRanges& members) override
      SIRTAKI_EXCLUDES(mutex_);
  core::Status RemoveSet(core::SetNumber set) override SIRTAKI_EXCLUDES(mutex_);

  std::unique_ptr<Completion> AllReduce(Channel channel, void* buffer, std::int64_t count,
                                        core::DType dtype, core::ReduceOp op,
                                        fusion::Scale after) override;
  std::unique_ptr<Completion> Reduce(Channel channel, void* buffer, std::int64_t count,
                                     core::DType dtype, core::ReduceOp op, int root) override;
  std::unique_ptr<Completion> Broadcast(Channel channel, void* buffer, std::int64_t bytes,
                                        int root) override;
  std::unique_ptr<Completion> AllGather(Channel channel, const void* input, void* output,
                                        std::int64_t bytes) override;
  std::unique_ptr<Completion> AllGatherV(Channel channel, const void* input, void* output,
                                         std::span<const std::int64_t> bytes) override;
  std::unique_ptr<Completion> Exchange(Channel channel, std::span<const OutgoingSlice> outgoing,
                                       std::span<const IncomingSlice> incoming) override;
  bool ReducesSegments(const SegmentReduction& how) const override;
  std::unique_ptr<Completion> AllReduceSegments(Channel channel, std::span<const Segment> segments,
                                                const SegmentReduction& how) override;
  core::MemorySource& memory() override { return group_.memory(); }
  bool Rings(Channel channel) const override {
    return options_.rings && channel.lane == fusion::Lane::kSmall;
  }

  // Messages are the medium's, not this backend's: kUnsupported.
  std::unique_ptr<Completion> SendMessage(int to, int tag, const void* memory,
                                          std::int64_t bytes) override;
  std::unique_ptr<Completion> ReceiveMessage(int from, int tag, void* memory,
                                             std::int64_t bytes) override;
  // Waiting operations return within a fraction of a second.
  void Abort(const core::Status& why) override;

 private:
  class Operation;
  class Queue;
  struct Lanes {
    std::shared_ptr<Queue> of_lane[kLanes];
    std::shared_ptr<Queue>& Of(fusion::Lane lane) { return of_lane[static_cast<int>(lane)]; }
  };

  // Precondition: the set's block is made.
  Lanes MakeLanes(core::SetNumber set, const core::RankRanges& members);
  std::shared_ptr<Queue> Find(Channel channel) SIRTAKI_EXCLUDES(mutex_);
  // Runs what `make(turn)` returns; on the small lane, begins it.
  template <typename Make>
  std::unique_ptr<Completion> Run(Channel channel, Make make);
  std::unique_ptr<Completion> ReduceOne(Channel channel, const Segment& segment, core::DType dtype,
                                        core::ReduceOp op, fusion::Scale after = {});

  LocalGroup& group_;
  const BackendOptions options_;
  const std::shared_ptr<StopSign> stop_ = std::make_shared<StopSign>();
  Blocks blocks_;
  core::Status made_;  // of the world's block
  core::Mutex mutex_;
  std::map<core::SetNumber, Lanes> sets_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::ops::shm
