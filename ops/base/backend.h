// Moves bytes between the members of a process set. There is one backend for each way of doing it:
// shared memory (ops/shm) and a port (ops/wire): MPI's (mpi), TCP's (tcp) or threads' (ops/inproc).
// NCCL is not a backend: it moves what lies on GPUs, in ops/nccl/device_lane. Backends must pass the
// same conformance tests (tests/support/backend_conformance.h).
//
// The members of a set call the same operations in the same order per lane; a lane is one line of
// work:
//   small  never blocks: an operation is submitted and finished by polling its Completion, under
//          the engine's token
//   large  ends inside the call, which blocks on the lane's own thread
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/types.h"
#include "core/machine/memory_source.h"
#include "fusion/convert.h"
#include "fusion/pack.h"
#include "fusion/planner.h"
#include "ops/base/keep_forever.h"

namespace sirtaki::ops {

// An operation under way. Destroying an unfinished one is allowed after a fault only; the memory it
// refers to must then stay alive, as WhenLetGo says.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual bool Poll() = 0;                  // true once finished; afterwards always true
  virtual core::Status status() const = 0;  // precondition: finished
};

// What one member gives to or takes from another. Slices of the same two members match in the order
// in which they are listed, and have the same size on both sides.
struct OutgoingSlice {
  int member = 0;  // index among the members; not this one
  const void* memory = nullptr;
  std::int64_t bytes = 0;  // 0: nothing is sent, and nothing expected
};
struct IncomingSlice {
  int member = 0;
  void* memory = nullptr;
  std::int64_t bytes = 0;
};

// A segment is one tensor of a reduction of many, as this member sees it.
using Segment = fusion::Piece;

// A segment's reduction is the same on all members.
struct SegmentReduction {
  core::DType dtype = core::DType::kF32;  // what ReduceParts (ops/base/kernels.h) takes
  core::ReduceOp op = core::ReduceOp::kSum;
  fusion::Scale before;  // of each element, widened
  fusion::Scale after;   // of the result, before it is rounded
};

struct Channel {
  core::SetNumber set = core::kWorldSet;
  fusion::Lane lane = fusion::Lane::kSmall;
};

// The collectives without a root, in which every member gives and gets.
class Rootless {
 public:
  virtual ~Rootless() = default;
  // The name as a timeline has it: "shm", "mpi", "by hosts". It lives as long as the process.
  virtual std::string_view name() const = 0;

  // When the memory of this channel's operations that have failed is touched no more, once their
  // Completions are gone: until then it must stay alive. The answer may outlive the backend.
  virtual LetGo WhenLetGo(Channel /*channel*/) const { return nullptr; }

  // Reduces `count` elements in place; the same bits on all members. `op` and `dtype`: those that
  // HasReduction (ops/base/kernels.h) names, with the meaning that ReduceInto gives them. The lanes
  // widen, scale and split into parts what has no reduction of its own. `after` scales the result, in
  // its own type: none but the identity, unless Backend::ScalesReduced.
  virtual std::unique_ptr<Completion> AllReduce(Channel channel, void* buffer, std::int64_t count,
                                                core::DType dtype, core::ReduceOp op,
                                                fusion::Scale after) = 0;
  // Every member gives `bytes` bytes; `output` holds size * bytes.
  virtual std::unique_ptr<Completion> AllGather(Channel channel, const void* input, void* output,
                                                std::int64_t bytes) = 0;
  // Member i gives bytes[i]; they follow each other in `output`. What a member gives may be in its
  // place there.
  virtual std::unique_ptr<Completion> AllGatherV(Channel channel, const void* input, void* output,
                                                 std::span<const std::int64_t> bytes) = 0;

  // ---- of those that reduce tensors where they lie ----

  // Whether AllReduceSegments is there for this reduction; the same on all members.
  virtual bool ReducesSegments(const SegmentReduction& /*how*/) const { return false; }
  // Reduces many tensors at once: widened to their accumulation type, scaled, combined in the order
  // of the members, scaled and rounded once; the same bits on all members. What no member gives is
  // not defined in the outputs. What a member keeps may be brought there alone (core::KeptPart).
  // Precondition: ReducesSegments.
  virtual std::unique_ptr<Completion> AllReduceSegments(Channel channel,
                                                        std::span<const Segment> segments,
                                                        const SegmentReduction& how);

  // ---- of those that reduce each member's part on its way ----

  // Whether ReduceScatter is there on this channel; the same on all members.
  virtual bool ReducesParts(Channel /*channel*/) const { return false; }
  // `buffer` holds a part of counts[i] elements for each member i, one after the other. Afterwards
  // this member's part is reduced over all members, and the rest is not defined. Precondition:
  // ReducesParts.
  virtual std::unique_ptr<Completion> ReduceScatter(Channel channel, void* buffer,
                                                    std::span<const std::int64_t> counts,
                                                    core::DType dtype, core::ReduceOp op);
};

class Backend;

// What carries the operations of a channel: those of Rootless go by `rootless`, the others by
// `backend`, and so may what is only a few bytes.
struct Route {
  Backend* backend = nullptr;
  Rootless* rootless = nullptr;
};

// The backends of a medium: a Backend itself, or several of which each serves some channels.
class Backends {
 public:
  virtual ~Backends() = default;

  // Makes the set's communicators. Called by all its members (others may call it, to no effect), at
  // its place in the order of the large lane and on that lane's thread; may block until all members
  // have called it. The world exists from the start.
  virtual core::Status AddSet(core::SetNumber set, const core::RankRanges& members) = 0;
  // Frees them, in the same place and on the same thread. Precondition: no operation of the set is
  // under way here.
  virtual core::Status RemoveSet(core::SetNumber set) = 0;

  // The route of a channel whose set is there, for as long as it is. Follows from what all members
  // know. Thread-safe.
  virtual Route Select(Channel channel) = 0;

  // Memory for gradients and for staging.
  virtual core::MemorySource& memory() { return core::PlainMemory(); }

  // Messages between two ranks of the world, beside the channels. They match by (sender, receiver,
  // tag) in the order of the calls. Polled, whatever the lanes do; called under the token. A sender
  // may be its own receiver. Tags from 0 to kMaxTag are a program's, and kAnswerTag is the lanes'
  // own. Both sides give the same number of bytes: another one may be an error of the receive. A send
  // is finished when its memory may be changed; whether that is before it is received is the medium's
  // affair. Messages may be destroyed unfinished without a fault; their memory must stay alive even
  // so, as WhenMessagesLetGo says.
  static constexpr int kMaxTag = 32000;
  static constexpr int kAnswerTag = kMaxTag + 1;
  virtual std::unique_ptr<Completion> SendMessage(int to, int tag, const void* memory,
                                                  std::int64_t bytes) = 0;
  virtual std::unique_ptr<Completion> ReceiveMessage(int from, int tag, void* memory,
                                                     std::int64_t bytes) = 0;

  virtual LetGo WhenMessagesLetGo() const { return nullptr; }

  // After a fault: blocked calls should return with an error if the medium can do that, and nothing
  // new starts. The lanes call it when they stop. The first reason stays. Thread-safe, never
  // blocks.
  virtual void Abort(const core::Status& why) = 0;
};

class Backend : public Rootless, public Backends {
 public:
  Route Select(Channel /*channel*/) final { return {this, this}; }
  LetGo WhenMessagesLetGo() const final { return WhenLetGo({}); }

  // Reduce is AllReduce with the result in the buffer of member `root`; what is in the others'
  // afterwards is not defined.
  virtual std::unique_ptr<Completion> Reduce(Channel channel, void* buffer, std::int64_t count,
                                             core::DType dtype, core::ReduceOp op, int root) = 0;
  // How many bytes AllReduce and Reduce of the large lane are best given at a time, where others get
  // `chunk_bytes`. The same on all members.
  virtual std::int64_t WindowBytes(Channel /*channel*/, std::int64_t chunk_bytes) const {
    return chunk_bytes;
  }
  // `root`: index among the members.
  virtual std::unique_ptr<Completion> Broadcast(Channel channel, void* buffer, std::int64_t bytes,
                                                int root) = 0;

  // ---- of backends that scale what they reduce on its way ----

  // Whether AllReduce scales its result, in its own type, on this channel; the same on all members.
  virtual bool ScalesReduced(Channel /*channel*/) const { return false; }

  // Whether the progress of polled operations rings the doorbells of the members' engines. False:
  // they have to look.
  virtual bool Rings(Channel /*channel*/) const { return false; }

  // Moves slices between members, each of whom may name as many as it likes.
  virtual std::unique_ptr<Completion> Exchange(Channel channel,
                                               std::span<const OutgoingSlice> outgoing,
                                               std::span<const IncomingSlice> incoming) = 0;

  // The small lane begins an operation when fewer than this many begun ones, from the oldest that
  // has not ended on, are before it: the medium may tell operations apart by a number that comes
  // again.
  static constexpr int kSmallAhead = 64;
};

}  // namespace sirtaki::ops
