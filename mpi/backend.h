// Host collectives by MPI. The small lane uses MPI's non-blocking collectives, polled; the large
// lane blocks in MPI on its own thread, which Open MPI serves about twice as fast for large
// vectors.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "mpi/communicators.h"
#include "mpi/operation.h"
#include "mpi/reductions.h"
#include "mpi/transfers.h"
#include "ops/base/backend.h"

namespace sirtaki::mpi {

struct BackendOptions {
  // One MPI call at a time: the large lane is polled as well (Environment::serialized()).
  bool serialized = false;

  // Longer operations are cut into calls of at most this many bytes, in whole elements. MPI counts
  // with int, some implementations compute byte offsets with it, too, and an all-reduce may take as
  // much temporary memory as the call has bytes.
  std::int64_t max_call_bytes = std::int64_t{256} << 20;
};

class Backend final : public ops::Backend {
 public:
  // The communicators must outlive the backend and all its operations.
  Backend(Communicators& communicators, BackendOptions options);
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  std::string_view name() const override { return "mpi"; }

  core::Status AddSet(core::SetNumber set, const core::RankRanges& members) override;
  core::Status RemoveSet(core::SetNumber set) override;

  std::unique_ptr<ops::Completion> AllReduce(ops::Channel channel, void* buffer, std::int64_t count,
                                             core::DType dtype, core::ReduceOp op) override;
  std::unique_ptr<ops::Completion> Reduce(ops::Channel channel, void* buffer, std::int64_t count,
                                          core::DType dtype, core::ReduceOp op, int root) override;
  std::unique_ptr<ops::Completion> Broadcast(ops::Channel channel, void* buffer, std::int64_t bytes,
                                             int root) override;
  std::unique_ptr<ops::Completion> AllGather(ops::Channel channel, const void* input, void* output,
                                             std::int64_t bytes) override;
  std::unique_ptr<ops::Completion> AllGatherV(ops::Channel channel, const void* input, void* output,
                                              std::span<const std::int64_t> bytes) override;
  std::unique_ptr<ops::Completion> AllToAll(ops::Channel channel, const void* input, void* output,
                                            std::int64_t bytes) override;

  std::unique_ptr<ops::Completion> Exchange(ops::Channel channel,
                                            std::span<const ops::OutgoingSlice> outgoing,
                                            std::span<const ops::IncomingSlice> incoming) override;
  std::unique_ptr<ops::Completion> SendMessage(int to, int tag, const void* memory,
                                               std::int64_t bytes) override;
  std::unique_ptr<ops::Completion> ReceiveMessage(int from, int tag, void* memory,
                                                  std::int64_t bytes) override;

  // No new operation and no further call of one under way starts. MPI has no means to interrupt a
  // call that blocks: its thread stays in it for the life of the process, and a polled operation
  // under way is polled or destroyed as before.
  void Abort(const core::Status& why) override { stop_->Set(why); }

 private:
  // `whole`: but for its memory, count and type.
  std::unique_ptr<ops::Completion> RunReduction(ops::Channel channel, const Call& whole,
                                                std::int64_t count, core::DType dtype,
                                                core::ReduceOp op);
  std::unique_ptr<ops::Completion> Run(ops::Channel channel, std::vector<Call> calls);
  std::unique_ptr<ops::Completion> RunMessage(const Transfer& message, int tag);
  Mode ModeOf(ops::Channel channel) const;
  void AddBroadcasts(void* buffer, std::int64_t bytes, int root, std::vector<Call>* calls) const;

  Communicators& communicators_;
  const BackendOptions options_;
  const std::shared_ptr<StopSign> stop_;
  const Reductions reductions_;
};

}  // namespace sirtaki::mpi
