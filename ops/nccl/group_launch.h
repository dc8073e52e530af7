// Puts a planned group of GPU tensors into the lane's stream: everything that the members of the
// set do for it, in the same order on all of them. Nothing here waits for the device but the kinds
// whose first dimension may differ by rank, which have to know everybody's rows to allocate, and the
// making of an arena.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/protocol/request.h"
#include "ops/cuda/device_work.h"
#include "ops/cuda/kernels.h"
#include "ops/groups/group_run.h"
#include "ops/groups/row_exchange.h"
#include "ops/nccl/arena.h"
#include "ops/nccl/communicator.h"
#include "ops/nccl/device_memory.h"

namespace sirtaki::ops::nccl {

// What a launch uses: the lane's, and those of the set whose group it is. Used by the lane's thread.
struct LaunchContext {
  const cuda::Stream& stream;
  cuda::EventPool& events;
  cuda::Kernels& kernels;
  Communicator& communicator;  // a rank is a member's index
  const std::shared_ptr<const Api>& api;
  DeviceMemory& staging;
  Arenas& arenas;
  PinnedMemory& host;
  bool registers_arenas = true;
  Patience patience;
  // Returns when the device has come to the event, or with the error that ends the wait.
  std::function<core::Status(const cuda::Event&)> await;
  // `drained` asks the same for all groups that were launched before.
  std::function<core::Status()> drained;
  // What the members have told of the group's rows; null: they all know.
  const RowExchange* rows = nullptr;
  // Marks where the inputs are there; null: nobody wants to know.
  cuda::EventPtr* inputs = nullptr;

  // One of NCCL's calls, in the lane's stream.
  template <typename Function, typename... Arguments>
  core::Status Call(const char* name, Function Api::*function, Arguments... arguments) const {
    return communicator.Run(
        name,
        [&](CommHandle comm) {
          return (communicator.api().*function)(arguments..., comm, stream.handle());
        },
        patience);
  }
  // Sends and receives between the members, this one with itself too, as one group of NCCL's.
  core::Status Exchange(const std::vector<OutgoingSlice>& outgoing,
                        const std::vector<IncomingSlice>& incoming) const;
  // Exchanges equal parts: part m of `from` goes to member m, and part m of `to` comes from it.
  core::Status ExchangeParts(const std::byte* from, std::byte* to, std::int64_t part_bytes) const;
  // Takes `own` to the device, has `call(from, to)` put there what the members make of it, and
  // brings that back into `told`: ranks of a lane meet on the device.
  template <typename Number>
  core::Status Ask(
      const std::vector<Number>& own, std::vector<Number>* told,
      const std::function<core::Status(const std::byte* from, std::byte* to)>& call) const {
    return AskBytes(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(*told)), call);
  }
  core::Status AskBytes(
      std::span<const std::byte> own, std::span<std::byte> told,
      const std::function<core::Status(const std::byte* from, std::byte* to)>& call) const;
  // Makes sure of the memory for an Ask of that many bytes.
  core::Status ReserveToAsk(std::size_t bytes, std::byte** pages, std::byte** device) const;
};

// HasFailed says whether a call of a group has gone wrong; one in progress has not.
bool HasFailed(Result result);

// The stream waits for whoever makes the tensors, not this thread.
core::Status AwaitProducers(const cuda::Stream& stream, const GroupTask& task);

// When it returns ok, an event that is recorded in the stream marks the end of the group. Else some
// of it may be under way: the group's fault. Throws what the outputs' allocation throws.
core::Status LaunchGroup(const LaunchContext& context, const GroupTask& task);

// ---- the kinds ----

core::Status LaunchReduce(const LaunchContext& context, const GroupTask& task);
core::Status LaunchReduceScatter(const LaunchContext& context, const GroupTask& task);
core::Status LaunchBroadcast(const LaunchContext& context, const GroupTask& task);
core::Status LaunchAllGatherInto(const LaunchContext& context, const GroupTask& task);
core::Status LaunchArena(const LaunchContext& context, const GroupTask& task);
// All-gather, gather, scatter and all-to-all.
core::Status LaunchExchange(const LaunchContext& context, const GroupTask& task);

// The type that NCCL calls it; of a type that it does not know, or does not compute with, bytes.
DataType DataTypeOf(core::DType dtype);

}  // namespace sirtaki::ops::nccl
