// Collectives in memory that the members share: each member reads the others' tensors where they
// lie, or what they have staged in their session memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "ops/backend.h"
#include "ops/shm/local_group.h"

namespace sirtaki::ops::shm {

struct BackendOptions {
  // The large lane blocks inside the call. False: it is polled, too.
  bool large_lane_blocks = true;
  // Short waits spin; false: they yield, since ranks outnumber cores.
  bool spin = true;
  std::int64_t chunk_bytes = std::int64_t{1} << 20;  // of what is staged at a time
};

class Backend final : public ops::Backend {
 public:
  // The group must outlive the backend and all its operations.
  Backend(LocalGroup& group, const BackendOptions& options);
  ~Backend() override;

  // Whether all these ranks are in the group.
  bool Covers(const core::RankRanges& members) const;

  std::string_view name() const override { return "shm"; }
  // The set is one that Covers.
  core::Status AddSet(core::SetNumber set, const core::RankRanges& members) override;
  core::Status RemoveSet(core::SetNumber set) override;

  std::unique_ptr<Completion> AllReduce(Channel channel, void* buffer, std::int64_t count,
                                        core::DType dtype, core::ReduceOp op) override;
  std::unique_ptr<Completion> Reduce(Channel channel, void* buffer, std::int64_t count,
                                     core::DType dtype, core::ReduceOp op, int root) override;
  std::unique_ptr<Completion> Broadcast(Channel channel, void* buffer, std::int64_t bytes,
                                        int root) override;
  std::unique_ptr<Completion> AllGather(Channel channel, const void* input, void* output,
                                        std::int64_t bytes) override;
  std::unique_ptr<Completion> AllGatherV(Channel channel, const void* input, void* output,
                                         std::span<const std::int64_t> bytes) override;
  std::unique_ptr<Completion> AllToAll(Channel channel, const void* input, void* output,
                                       std::int64_t bytes) override;
  std::unique_ptr<Completion> Exchange(Channel channel, std::span<const OutgoingSlice> outgoing,
                                       std::span<const IncomingSlice> incoming) override;
  bool ReducesSegments(Channel channel, const SegmentReduction& how) const override;
  std::unique_ptr<Completion> AllReduceSegments(Channel channel, std::span<const Segment> segments,
                                                const SegmentReduction& how) override;
  core::MemorySource& memory() override { return group_.memory(); }
  bool Rings(Channel channel) const override;

  // Not here: messages are the medium's. kUnsupported.
  std::unique_ptr<Completion> SendMessage(int to, int tag, const void* memory,
                                          std::int64_t bytes) override;
  std::unique_ptr<Completion> ReceiveMessage(int from, int tag, void* memory,
                                             std::int64_t bytes) override;
  // What waits returns within a fraction of a second.
  void Abort(const core::Status& why) override;

 private:
  LocalGroup& group_;
  const BackendOptions options_;
};

}  // namespace sirtaki::ops::shm
