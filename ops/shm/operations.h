// The collective operations, each as the steps of one member.
//
// Where tensors may be touched where they lie, the members first say where that is. What all see
// is read (and written) in place; the rest travels through the frames, two or three of which are
// under way at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/base/backend.h"
#include "ops/shm/channel.h"
#include "ops/shm/steps.h"

namespace sirtaki::ops::shm {

// One operation of a channel. Its frames come after those of the operations before it.
class Turn {
 public:
  explicit Turn(SharedChannel& channel) : channel_(&channel), ticket_(channel.TakeTicket()) {}

  SharedChannel& channel() const { return *channel_; }
  Wait Comes() const { return channel_->Turn(ticket_); }
  Wait Room(const Frame& frame) const { return channel_->Room(frame); }
  Wait Arrival(const Frame& frame) const { return channel_->Arrival(ticket_, frame); }
  // The next operation may write: all frames of this one are written.
  void Pass();
  // Whether the operations before it have finished.
  bool IsOldest() const { return channel_->IsOldest(ticket_); }
  void Finish();

 private:
  SharedChannel* channel_;
  std::uint64_t ticket_;
  bool passed_ = false;
};

// ---- reductions.cc ----

// All-reduce, and by outputs that are null reduce. `turn` must outlive the steps, here and below.
Steps ReduceSegments(Turn& turn, std::vector<Segment> segments, SegmentReduction how);

// ---- movements.cc ----

// A member gives `bytes` bytes to all; the others take them at `output`.
struct Gift {
  std::int64_t bytes = 0;
  void* output = nullptr;  // null: not wanted here
};
// Broadcast, and the gathers to all. `input`: this member's.
Steps GiveToAll(Turn& turn, const void* input, std::vector<Gift> gifts);

Steps Exchange(Turn& turn, std::vector<OutgoingSlice> outgoing,
               std::vector<IncomingSlice> incoming);

// This many bytes of others' tensors are read or written between two looks at the stop sign.
inline constexpr std::int64_t kUnwatchedBytes = std::int64_t{1} << 20;

// How memory that lies where it cannot be seen, and memory that is none, are told to the others.
inline constexpr std::int64_t kPrivate = -1;
inline constexpr std::int64_t kNothing = -2;

}  // namespace sirtaki::ops::shm
