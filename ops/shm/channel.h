// One lane of one process set in shared memory: each member writes a stream of frames into a ring
// of its own, which all the others read.
//
// A frame has the same size on all members, so all have the same places: what a member has written
// and what it has read of everybody's are two numbers. An operation is a sequence of frames; the
// members' streams follow from the order of the operations, which is the same for all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"
#include "core/engine/peer_watch.h"
#include "fusion/planner.h"
#include "ops/base/stop_sign.h"
#include "ops/shm/blocks.h"
#include "ops/shm/local_group.h"

namespace sirtaki::ops::shm {

class SharedChannel;

// A Wait says what an operation awaits.
struct Wait {
  enum class For : std::uint8_t {
    kTurn,     // the operations before have written all their frames
    kRoom,     // everybody has read up to `target`
    kArrival,  // everybody has written up to `target`; the operations before are finished
  };
  SharedChannel* channel = nullptr;
  For what = For::kTurn;
  std::uint64_t ticket = 0;
  std::uint32_t target = 0;
};

// One piece of the streams.
struct Frame {
  std::int64_t offset = 0;  // in the rings
  std::int64_t end = 0;     // in the streams
  std::int64_t bytes = 0;   // without the digest
};

struct ChannelOptions {
  core::SetNumber set = core::kWorldSet;
  fusion::Lane lane = fusion::Lane::kSmall;
  bool verify = false;  // each frame carries its digest; nothing is read where it lies
  std::int64_t chunk_bytes = 0;
};

// A channel is not thread-safe; different ones are independent. The group must outlive it.
class SharedChannel {
 public:
  // `members`: indices in the group, ascending; this rank is one of them, and its block is made.
  SharedChannel(LocalGroup& group, const Blocks& blocks, std::vector<int> members,
                const ChannelOptions& options, std::shared_ptr<const StopSign> stop);

  int size() const { return static_cast<int>(peers_.size()); }
  int self() const { return self_; }
  // Operations may read and write the members' tensors where they lie.
  bool direct() const { return !polled() && !options_.verify && size() > 1; }
  // The most that a frame holds; four of them fit.
  std::int64_t frame_bytes() const { return frame_bytes_; }
  const StopSign& stop() const { return *stop_; }

  // ---- tensors where they lie ----
  std::int64_t OffsetOf(const void* memory) const { return group_.OffsetOf(memory); }
  std::byte* At(int member, std::int64_t offset) const {
    return group_.At(peers_[static_cast<std::size_t>(member)].index, offset);
  }

  // ---- the order of operations ----
  std::uint64_t TakeTicket() { return next_ticket_++; }
  void PassTurn() { ++writing_; }
  bool IsOldest(std::uint64_t ticket) const { return finishing_ == ticket; }
  void Finish() { ++finishing_; }

  // ---- frames, in this order ----
  Frame Reserve(std::int64_t bytes);
  std::byte* Mine(const Frame& frame) const { return Of(self_, frame); }
  void Publish(const Frame& frame);
  // Verify checks a frame that has arrived: each member's is as it was published. `first`: how many
  // bytes of frames the operation, of a reduction its round, has had before. Errors: kBackend, naming
  // the ranks and bytes.
  core::Status Verify(const Frame& frame, std::int64_t first) const;
  std::byte* Of(int member, const Frame& frame) const {
    return peers_[static_cast<std::size_t>(member)].ring + frame.offset;
  }
  // All of this and the frames before has been read.
  void Release(const Frame& frame);

  // ---- waits ----
  Wait Turn(std::uint64_t ticket) { return {this, Wait::For::kTurn, ticket, 0}; }
  Wait Room(const Frame& frame) {
    return {this, Wait::For::kRoom, 0, Count(frame.end - ring_bytes_)};
  }
  Wait Arrival(std::uint64_t ticket, const Frame& frame) {
    return {this, Wait::For::kArrival, ticket, Count(frame.end)};
  }
  bool IsOver(const Wait& wait);
  // Whether a member has given up while this one was at its tensors, so that what came of it is
  // worth nothing. Its fault is on its way, or its end is noticed.
  bool IsVoid() const;
  // Blocks until it is over. Errors: why the backend was stopped, as it is when a member is lost; that a
  // member's process has ended, which the engine should have said.
  core::Status Block(const Wait& wait, bool spin);
  // Blocks until the fault is there, and gives it, as Block does.
  core::Status AwaitFault();

 private:
  // A wait that begins then looks with this whether the process of a member has ended.
  core::PeerWatch WatchPeers(core::TimePoint begin) const;

  static constexpr std::int64_t kUnit = 64;
  struct Peer {
    int index = 0;  // in the group
    Progress* progress = nullptr;
    std::byte* ring = nullptr;
  };

  // A polled channel rings the members' bells when it makes progress.
  bool polled() const { return options_.lane == fusion::Lane::kSmall; }
  static std::uint32_t Count(std::int64_t position) {
    return static_cast<std::uint32_t>(position / kUnit);
  }
  // A counter that is not yet where the wait needs it, and what it says; null if there is none.
  SharedCounter* Behind(const Wait& wait, std::uint32_t* seen) const;
  // Finds the members' blocks. The first member that has not made its own; -1: none.
  int FindBlocks();
  void Ring(int member) const;

  LocalGroup& group_;
  const Blocks& blocks_;
  const ChannelOptions options_;
  const std::shared_ptr<const StopSign> stop_;
  const std::int64_t ring_bytes_;
  const std::int64_t frame_bytes_;
  std::vector<Peer> peers_;
  int self_ = 0;
  bool found_ = false;         // all blocks
  std::int64_t reserved_ = 0;  // of the streams
  std::int64_t released_ = 0;
  std::uint64_t next_ticket_ = 0;
  std::uint64_t writing_ = 0;  // the ticket whose turn it is
  std::uint64_t finishing_ = 0;
  int sleeps_at_once_ = 0;  // of the next waits, instead of yielding
};

}  // namespace sirtaki::ops::shm
