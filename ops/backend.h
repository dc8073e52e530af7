// Moves bytes between the members of a process set. One backend for each way of doing it:
// in-process (ops/inproc), MPI (mpi/backend), later shared memory and NCCL. Backends share file
// names and must pass the same conformance tests.
//
// The members of a set call the same operations in the same order per lane; a lane is one line of
// work:
//   small  never blocks: an operation is submitted and finished by polling its Completion, under
//   the
//          engine's token
//   large  may block inside the call, on the lane's own thread
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/rank_ranges.h"
#include "core/status.h"
#include "core/types.h"
#include "fusion/planner.h"

namespace sirtaki::ops {

// An operation under way. Destroying an unfinished one is allowed after a fault only; the memory it
// refers to must then stay alive.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual bool Poll() = 0;                  // true once finished; afterwards always true
  virtual core::Status status() const = 0;  // precondition: finished
};

struct Channel {
  core::SetNumber set = core::kWorldSet;
  fusion::Lane lane = fusion::Lane::kSmall;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  // Of the operations below: all-reduce for the types that AllReduceSum takes.
  virtual bool Supports(core::OpKind kind, core::DType dtype, core::DeviceKind device) const = 0;

  // Collective over the world: makes the set's communicators. The world exists from the start.
  virtual core::Status AddSet(core::SetNumber set, const core::RankRanges& members) = 0;

  // Sums `count` elements in place. dtype: the types that have an arithmetic of their own here
  // (u8 i8 i16 i32 i64 f32 f64); integers wrap. The lane reduces half types itself, by
  // AllToAll and AllGather, or widens them before they come here.
  virtual std::unique_ptr<Completion> AllReduceSum(Channel channel, void* buffer,
                                                   std::int64_t count, core::DType dtype) = 0;
  // `root`: index among the members.
  virtual std::unique_ptr<Completion> Broadcast(Channel channel, void* buffer, std::int64_t bytes,
                                                int root) = 0;
  // Every member gives `bytes` bytes; `output` holds size * bytes.
  virtual std::unique_ptr<Completion> AllGather(Channel channel, const void* input, void* output,
                                                std::int64_t bytes) = 0;
  // Member i gives bytes[i]; they follow each other in `output`.
  virtual std::unique_ptr<Completion> AllGatherV(Channel channel, const void* input, void* output,
                                                 std::span<const std::int64_t> bytes) = 0;

  // `input` and `output` hold a part of `bytes` bytes for each member: part j of member i's input
  // becomes part i of member j's output. The memories are disjoint.
  virtual std::unique_ptr<Completion> AllToAll(Channel channel, const void* input, void* output,
                                               std::int64_t bytes) = 0;

  // After a fault: blocked calls should return with an error if the medium can do that, and nothing
  // new starts. The lanes call it when they stop. The first reason stays. Thread-safe, never
  // blocks.
  virtual void Abort(const core::Status& why) = 0;
};

}  // namespace sirtaki::ops
