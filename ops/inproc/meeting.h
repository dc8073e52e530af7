// One collective of the in-process world: what each member brings, and how the last of them carries
// it out for all. For the files of ops/inproc only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/types.h"
#include "ops/base/backend.h"

namespace sirtaki::ops {

// What a member brings to a meeting.
struct Deposit {
  enum class Call : std::uint8_t {
    kAllReduce,
    kReduce,
    kBroadcast,
    kAllGather,
    kAllGatherV,
    kExchange,
  };

  Call call = Call::kAllReduce;
  const void* input = nullptr;  // gathers
  void* output = nullptr;       // the buffer of reductions and broadcast
  std::int64_t count = 0;       // elements of reductions; bytes of broadcast and all-gather
  core::DType dtype = core::DType::kU8;
  core::ReduceOp op = core::ReduceOp::kSum;
  int root = -1;
  std::vector<std::int64_t> bytes = {};  // all-gather-v
  std::vector<OutgoingSlice> outgoing = {};
  std::vector<IncomingSlice> incoming = {};

  // Whether member `index` of `members` may ask for this, whatever the others bring.
  bool IsPossible(std::size_t index, std::size_t members) const;
  // Slices are compared when all are there.
  bool AgreesWith(const Deposit& other) const;
  std::string ToString() const;
};

// One operation for which members arrive. Guarded by the world's mutex, but while it is being
// carried out: then its deposits belong to the member who does that.
struct Meeting {
  enum class State : std::uint8_t { kGathering, kMoving, kDone };

  State state = State::kGathering;
  core::Status status;
  core::RankRanges members;
  std::vector<Deposit> deposits;  // by member
  std::size_t arrived = 0;
  int first_rank = -1;  // who arrived first, and as which member
  std::size_t first = 0;

  void Fail(const core::Status& why) {
    if (state != State::kGathering) return;
    state = State::kDone;
    status = why;
  }
};

// Moves and reduces, in the order of the members. Precondition: the deposits agree. An error if
// slices do not match; they are then not moved. `members`: for its text.
core::Status CarryOut(const std::vector<Deposit>& deposits, const core::RankRanges& members);

}  // namespace sirtaki::ops
