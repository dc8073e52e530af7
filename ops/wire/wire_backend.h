// Every collective over a port: what MPI carries between hosts, and between the ranks of a host that
// share no memory.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/thread_annotations.h"
#include "ops/base/backend.h"
#include "ops/base/stop_sign.h"
#include "ops/wire/port.h"
#include "ops/wire/runs.h"

namespace sirtaki::ops::wire {

struct WireOptions {
  std::vector<int> host_of_rank;  // empty: all are on one host
  // Longer operations of the large lane go in chunks of about this many bytes, of which several are
  // under way: while one is reduced, the next crosses.
  std::int64_t chunk_bytes = std::int64_t{512} << 10;
  // Up to this many bytes an operation takes few steps and moves more than it had to.
  std::int64_t few_steps_bytes = std::int64_t{32} << 10;
};

class WireBackend : public Backend {
 public:
  // The port must outlive the backend and all its operations.
  WireBackend(Port& port, WireOptions options);
  WireBackend(const WireBackend&) = delete;
  WireBackend& operator=(const WireBackend&) = delete;

  std::string_view name() const override { return port_.name(); }
  LetGo WhenLetGo(Channel /*channel*/) const override {
    return port_.lets_go() ? LetsGoAtOnce() : nullptr;
  }

  // Nobody waits for anybody. Errors: kUnsupported if the port has too few tags for another set.
  core::Status AddSet(core::SetNumber set, const core::RankRanges& members) override
      SIRTAKI_EXCLUDES(mutex_);
  core::Status RemoveSet(core::SetNumber set) override SIRTAKI_EXCLUDES(mutex_);

  std::unique_ptr<Completion> AllReduce(Channel channel, void* buffer, std::int64_t count,
                                        core::DType dtype, core::ReduceOp op,
                                        fusion::Scale after) override;
  // A set of one runs nothing, and so would not scale.
  bool ScalesReduced(Channel channel) const override {
    const PartyPtr party = PartyOf(channel);
    return party != nullptr && party->size() > 1;
  }
  std::unique_ptr<Completion> Reduce(Channel channel, void* buffer, std::int64_t count,
                                     core::DType dtype, core::ReduceOp op, int root) override;
  std::int64_t WindowBytes(Channel channel, std::int64_t chunk_bytes) const override;
  std::unique_ptr<Completion> Broadcast(Channel channel, void* buffer, std::int64_t bytes,
                                        int root) override;
  std::unique_ptr<Completion> AllGather(Channel channel, const void* input, void* output,
                                        std::int64_t bytes) override;
  std::unique_ptr<Completion> AllGatherV(Channel channel, const void* input, void* output,
                                         std::span<const std::int64_t> bytes) override;
  bool ReducesParts(Channel channel) const override { return channel.lane == fusion::Lane::kLarge; }
  std::unique_ptr<Completion> ReduceScatter(Channel channel, void* buffer,
                                            std::span<const std::int64_t> counts, core::DType dtype,
                                            core::ReduceOp op) override;
  std::unique_ptr<Completion> Exchange(Channel channel, std::span<const OutgoingSlice> outgoing,
                                       std::span<const IncomingSlice> incoming) override;
  std::unique_ptr<Completion> SendMessage(int to, int tag, const void* memory,
                                          std::int64_t bytes) override;
  std::unique_ptr<Completion> ReceiveMessage(int from, int tag, void* memory,
                                             std::int64_t bytes) override;

  // Returns when all members have called it, with what each has said, in the order of the members;
  // beside the lanes, by one thread for a set at a time. `patience` is asked again and again: its
  // error ends the wait.
  core::Status Meet(core::SetNumber set, const core::RankRanges& members, char mine,
                    const std::function<core::Status()>& patience, std::string* all);

  // What blocks returns within a fraction of a second.
  void Abort(const core::Status& why) override SIRTAKI_EXCLUDES(mutex_);

 private:
  static constexpr int kLanes = 2;
  // Operations of a lane that may be under way at once, several times over.
  static constexpr int kTagsOfLane = 64;
  // So what has a tag has ended on this rank, all it sends or receives by it posted, before the tag
  // is used again.
  static_assert(kTagsOfLane >= kSmallAhead);
  static constexpr int kTagsOfSet = kLanes * kTagsOfLane;

  struct Set {
    PartyPtr party;
    int first_tag = 0;
    std::array<std::uint32_t, kLanes> next{};  // runs that were started, by lane
  };
  // `i`: of `count` runs, each of a chunk.
  using MakeRun = std::function<std::unique_ptr<Run>(std::int64_t i, const Seat& seat)>;

  std::int64_t BlockOf(core::SetNumber set) const;
  PartyPtr PartyOf(Channel channel) const SIRTAKI_EXCLUDES(mutex_);
  // Starts an operation that consists of `runs` runs.
  std::unique_ptr<Completion> Start(Channel channel, std::int64_t runs, const MakeRun& make)
      SIRTAKI_EXCLUDES(mutex_);
  // Begins it where it is polled, runs it to its end where the lane blocks.
  std::unique_ptr<Completion> Through(Channel channel, std::unique_ptr<Operation> operation);
  // The runs of `whole`, a reduction's, are cut into chunks.
  std::unique_ptr<Completion> InChunks(
      Channel channel, const Reduction& whole,
      const std::function<std::unique_ptr<Run>(const Reduction& chunk, const Seat& seat)>& make);
  std::int64_t ChunkBytes(Channel channel, const Party& party) const;

  Port& port_;
  const WireOptions options_;
  mutable core::Mutex mutex_;
  std::map<core::SetNumber, Set> sets_ SIRTAKI_GUARDED_BY(mutex_);
  StopSign stop_;
};

}  // namespace sirtaki::ops::wire
