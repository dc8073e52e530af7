// Sends each operation to the backend that does it best: shared memory for process sets of one
// host, by hosts for large all-reduces of sets that span several, the medium's own for the rest and
// for messages. Decided by what all members agree on.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string_view>

#include "core/base/rank_ranges.h"
#include "core/base/thread_annotations.h"
#include "ops/base/backend.h"
#include "ops/between_hosts/hierarchy.h"
#include "ops/shm/backend.h"

namespace sirtaki::ops {

class BackendSelection final : public Backend {
 public:
  // `flat`: takes every set. `local`: null if this host's ranks share no memory. `hierarchy`: null
  // if nothing goes that way; it knows the world already. All must outlive this and all operations.
  BackendSelection(Backend& flat, shm::Backend* local, const core::RankRanges& world,
                   Hierarchy* hierarchy = nullptr);

  std::string_view name() const override { return "selecting"; }
  std::string_view CarrierOf(Channel channel, bool all_reduce) const override {
    return all_reduce && ByHosts(channel) ? "by hosts" : For(channel).name();
  }
  core::Status AddSet(core::SetNumber set, const core::RankRanges& members) override
      SIRTAKI_EXCLUDES(mutex_);
  core::Status RemoveSet(core::SetNumber set) override SIRTAKI_EXCLUDES(mutex_);

  std::unique_ptr<Completion> AllReduce(Channel channel, void* buffer, std::int64_t count,
                                        core::DType dtype, core::ReduceOp op) override;
  std::unique_ptr<Completion> Reduce(Channel channel, void* buffer, std::int64_t count,
                                     core::DType dtype, core::ReduceOp op, int root) override {
    return For(channel).Reduce(channel, buffer, count, dtype, op, root);
  }
  std::int64_t WindowBytes(Channel channel, std::int64_t chunk_bytes) const override {
    return For(channel).WindowBytes(channel, chunk_bytes);
  }
  std::unique_ptr<Completion> Broadcast(Channel channel, void* buffer, std::int64_t bytes,
                                        int root) override {
    return For(channel).Broadcast(channel, buffer, bytes, root);
  }
  std::unique_ptr<Completion> AllGather(Channel channel, const void* input, void* output,
                                        std::int64_t bytes) override {
    return For(channel).AllGather(channel, input, output, bytes);
  }
  std::unique_ptr<Completion> AllGatherV(Channel channel, const void* input, void* output,
                                         std::span<const std::int64_t> bytes) override {
    return For(channel).AllGatherV(channel, input, output, bytes);
  }
  std::unique_ptr<Completion> AllToAll(Channel channel, const void* input, void* output,
                                       std::int64_t bytes) override {
    return For(channel).AllToAll(channel, input, output, bytes);
  }
  bool ReducesSegments(Channel channel, const SegmentReduction& how) const override;
  std::unique_ptr<Completion> AllReduceSegments(Channel channel, std::span<const Segment> segments,
                                                const SegmentReduction& how) override;
  bool ScalesReduced(Channel channel) const override { return For(channel).ScalesReduced(channel); }
  std::unique_ptr<Completion> AllReduceScaled(Channel channel, void* buffer, std::int64_t count,
                                              core::DType dtype, core::ReduceOp op,
                                              fusion::Scale after) override {
    return For(channel).AllReduceScaled(channel, buffer, count, dtype, op, after);
  }
  bool ReducesParts(Channel channel) const override { return For(channel).ReducesParts(channel); }
  std::unique_ptr<Completion> ReduceScatter(Channel channel, void* buffer,
                                            std::span<const std::int64_t> counts, core::DType dtype,
                                            core::ReduceOp op) override {
    return For(channel).ReduceScatter(channel, buffer, counts, dtype, op);
  }
  core::MemorySource& memory() override {
    return local_ != nullptr ? local_->memory() : flat_.memory();
  }
  bool Rings(Channel channel) const override { return For(channel).Rings(channel); }
  std::unique_ptr<Completion> Exchange(Channel channel, std::span<const OutgoingSlice> outgoing,
                                       std::span<const IncomingSlice> incoming) override {
    return For(channel).Exchange(channel, outgoing, incoming);
  }
  std::unique_ptr<Completion> SendMessage(int to, int tag, const void* memory,
                                          std::int64_t bytes) override {
    return flat_.SendMessage(to, tag, memory, bytes);
  }
  std::unique_ptr<Completion> ReceiveMessage(int from, int tag, void* memory,
                                             std::int64_t bytes) override {
    return flat_.ReceiveMessage(from, tag, memory, bytes);
  }
  void Abort(const core::Status& why) override;

 private:
  Backend& For(Channel channel) const SIRTAKI_EXCLUDES(mutex_);
  bool ByHosts(Channel channel) const {
    return hierarchy_ != nullptr && hierarchy_->Covers(channel);
  }

  Backend& flat_;
  shm::Backend* const local_;
  Hierarchy* const hierarchy_;
  mutable core::Mutex mutex_;
  std::map<core::SetNumber, Backend*> of_set_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::ops
