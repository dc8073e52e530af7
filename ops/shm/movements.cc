// Operations that move bytes without changing them: the others read what lies where they see it,
// and the rest from the frames.
#include <algorithm>
#include <cstring>
#include <string>

#include "ops/base/bytes.h"
#include "ops/shm/operations.h"

namespace sirtaki::ops::shm {

using core::Status;
using core::StatusCode;

namespace {

// Less than this is copied sooner than it is told where it lies.
constexpr std::int64_t kWorthTelling = std::int64_t{16} << 10;

std::byte* Plus(void* memory, std::int64_t offset) {
  return static_cast<std::byte*>(memory) + offset;
}
const std::byte* Plus(const void* memory, std::int64_t offset) {
  return static_cast<const std::byte*>(memory) + offset;
}

// Copies in pieces between which the stop sign is read. False: stopped.
bool CopyWatching(const StopSign& stop, void* to, const void* from, std::int64_t bytes) {
  for (std::int64_t done = 0; done < bytes; done += kUnwatchedBytes) {
    if (stop.raised()) return false;
    Copy(Plus(to, done), Plus(from, done), std::min(kUnwatchedBytes, bytes - done));
  }
  return true;
}

}  // namespace

void Turn::Pass() {
  if (!passed_) channel_->PassTurn();
  passed_ = true;
}

void Turn::Finish() {
  Pass();
  channel_->Finish();
}

Steps GiveToAll(Turn& turn, const void* input, std::vector<Gift> gifts) {
  SharedChannel& channel = turn.channel();
  const int self = channel.self();
  const Gift& mine = gifts[static_cast<std::size_t>(self)];
  if (mine.output != nullptr) Copy(mine.output, input, mine.bytes);
  std::int64_t longest = 0;
  for (const Gift& gift : gifts) longest = std::max(longest, gift.bytes);
  bool in_use = false;  // peers may still read this member's memory
  co_await turn.Comes();

  if (channel.direct() && longest >= kWorthTelling) {
    const Frame told = channel.Reserve(static_cast<std::int64_t>(sizeof(std::int64_t)));
    co_await turn.Room(told);
    const std::int64_t place = mine.bytes > 0 ? channel.OffsetOf(input) : kNothing;
    std::memcpy(channel.Mine(told), &place, sizeof(place));
    channel.Publish(told);
    co_await turn.Arrival(told);
    std::vector<std::int64_t> places(gifts.size());
    for (std::size_t m = 0; m < gifts.size(); ++m) {
      std::memcpy(&places[m], channel.Of(static_cast<int>(m), told), sizeof(place));
    }
    channel.Release(told);
    longest = 0;
    for (std::size_t m = 0; m < gifts.size(); ++m) {
      if (places[m] < 0) {
        if (places[m] == kPrivate) longest = std::max(longest, gifts[m].bytes);
        continue;
      }
      in_use = true;
      const int member = static_cast<int>(m);
      if (member != self && gifts[m].output != nullptr &&
          !CopyWatching(channel.stop(), gifts[m].output, channel.At(member, places[m]),
                        gifts[m].bytes)) {
        co_return channel.stop().why();
      }
      gifts[m].bytes = 0;
    }
  }

  const std::int64_t chunk = channel.frame_bytes();
  Frame next;
  for (std::int64_t begin = -chunk; begin < longest && longest > 0; begin += chunk) {
    const Frame frame = next;
    const std::int64_t following = begin + chunk;
    if (following < longest) {
      next = channel.Reserve(std::min(chunk, longest - following));
      co_await turn.Room(next);
      const std::int64_t bytes = std::min(chunk, mine.bytes - following);
      if (bytes > 0) Copy(channel.Mine(next), Plus(input, following), bytes);
      channel.Publish(next);
      if (following + chunk >= longest) turn.Pass();
    }
    if (begin < 0) continue;
    co_await turn.Arrival(frame);
    if (Status seen = channel.Verify(frame, begin); !seen.ok()) co_return seen;
    for (int m = 0; m < channel.size(); ++m) {
      const Gift& gift = gifts[static_cast<std::size_t>(m)];
      const std::int64_t bytes = std::min(chunk, gift.bytes - begin);
      if (bytes > 0 && m != self && gift.output != nullptr) {
        Copy(Plus(gift.output, begin), channel.Of(m, frame), bytes);
      }
    }
    channel.Release(frame);
    in_use = false;
  }
  if (in_use) {
    const Frame over = channel.Reserve(1);
    co_await turn.Room(over);
    channel.Publish(over);
    turn.Pass();
    co_await turn.Arrival(over);
    channel.Release(over);
  }
  co_return Status::Ok();
}

namespace {

// A frame of an exchange holds a header for each member, then what lies in the frame itself.
struct Piece {
  std::int64_t place = kPrivate;  // in the sender's visible memory; kPrivate: in the frame
  std::int64_t begin = 0;         // there
  std::int64_t bytes = 0;
};
struct Letter {  // of one member to another
  static constexpr std::size_t kPieces = 8;
  std::int64_t pieces = 0;
  std::int64_t more = 0;  // whether there is another frame from this member to anyone
  Piece piece[kPieces];
};

// One member gives these slices to another, in order; `Byte` is const for what this one gives.
template <typename Byte>
class SliceQueue {
 public:
  struct Slice {
    Byte* memory;
    std::int64_t bytes;
  };
  template <typename Memory>
  void Add(Memory* memory, std::int64_t bytes) {
    if (bytes > 0) slices_.push_back({static_cast<Byte*>(memory), bytes});
  }
  bool empty() const { return next_ == slices_.size(); }
  const Slice& front() const { return slices_[next_]; }
  // The first bytes of the front are done.
  void Pass(std::int64_t bytes) {
    Slice& slice = slices_[next_];
    slice.memory += bytes;
    slice.bytes -= bytes;
    if (slice.bytes == 0) ++next_;
  }

 private:
  std::vector<Slice> slices_;
  std::size_t next_ = 0;
};
using OutgoingPieces = SliceQueue<const std::byte>;
using IncomingPieces = SliceQueue<std::byte>;

// Up to `room` bytes of what this member gives go to `frame` from `*used` on.
void Write(OutgoingPieces* out, const SharedChannel& channel, std::int64_t room, std::byte* frame,
           std::int64_t* used, Letter* letter) {
  const std::int64_t limit = *used + room;
  while (!out->empty() && letter->pieces < static_cast<std::int64_t>(Letter::kPieces)) {
    const auto& slice = out->front();
    const std::int64_t place = channel.direct() && slice.bytes >= kWorthTelling
                                   ? channel.OffsetOf(slice.memory)
                                   : kPrivate;
    const std::int64_t bytes =
        place != kPrivate ? slice.bytes : std::min(slice.bytes, limit - *used);
    if (bytes == 0) return;
    letter->piece[letter->pieces++] = {place, *used, bytes};
    if (place == kPrivate) {
      Copy(frame + *used, slice.memory, bytes);
      *used += bytes;
    }
    out->Pass(bytes);
  }
}

// Takes what has come. False: there is more than is expected, or it is to stop.
bool Take(IncomingPieces* in, const StopSign& stop, const std::byte* from, std::int64_t bytes) {
  while (bytes > 0) {
    if (in->empty()) return false;
    const std::int64_t part = std::min(bytes, in->front().bytes);
    if (!CopyWatching(stop, in->front().memory, from, part)) return false;
    from += part;
    bytes -= part;
    in->Pass(part);
  }
  return true;
}

Status Disagree(const SharedChannel& channel, std::size_t member) {
  if (channel.stop().raised()) return channel.stop().why();
  return {StatusCode::kBackend, "members disagree on what member " + std::to_string(member) +
                                    " gives to member " + std::to_string(channel.self())};
}

}  // namespace

Steps Exchange(Turn& turn, std::vector<OutgoingSlice> outgoing,
               std::vector<IncomingSlice> incoming) {
  SharedChannel& channel = turn.channel();
  const auto members = static_cast<std::size_t>(channel.size());
  const auto self = static_cast<std::size_t>(channel.self());
  std::vector<OutgoingPieces> out(members);
  std::vector<IncomingPieces> in(members);
  for (const OutgoingSlice& slice : outgoing) {
    out[static_cast<std::size_t>(slice.member)].Add(slice.memory, slice.bytes);
  }
  for (const IncomingSlice& slice : incoming) {
    in[static_cast<std::size_t>(slice.member)].Add(slice.memory, slice.bytes);
  }
  const auto letters = static_cast<std::int64_t>(members * sizeof(Letter));
  const std::int64_t frame_bytes = std::max(channel.frame_bytes(), 2 * letters);
  const std::int64_t room =
      (frame_bytes - letters) / std::max<std::int64_t>(channel.size() - 1, 1) / 64 * 64;
  co_await turn.Comes();

  bool more = members > 1;
  bool in_use = false;     // peers may still read this member's memory
  std::int64_t first = 0;  // byte of the frame, of all
  while (more) {
    const Frame frame = channel.Reserve(frame_bytes);
    co_await turn.Room(frame);
    std::byte* const memory = channel.Mine(frame);
    auto* const letter = reinterpret_cast<Letter*>(memory);
    std::int64_t used = letters;
    bool i_have_more = false;
    for (std::size_t m = 0; m < members; ++m) {
      letter[m].pieces = 0;
      Write(&out[m], channel, room, memory, &used, &letter[m]);
      i_have_more = i_have_more || !out[m].empty();
    }
    for (std::size_t m = 0; m < members; ++m) letter[m].more = i_have_more ? 1 : 0;
    channel.Publish(frame);
    co_await turn.Arrival(frame);
    if (Status seen = channel.Verify(frame, first); !seen.ok()) co_return seen;
    first += frame.bytes;
    more = false;
    in_use = false;
    for (std::size_t m = 0; m < members; ++m) {
      const std::byte* const theirs = channel.Of(static_cast<int>(m), frame);
      const auto* const to = reinterpret_cast<const Letter*>(theirs);
      more = more || to[self].more != 0;
      for (std::size_t p = 0; m != self && p < static_cast<std::size_t>(to[self].pieces); ++p) {
        const Piece& piece = to[self].piece[p];
        const std::byte* const from = piece.place == kPrivate
                                          ? theirs + piece.begin
                                          : channel.At(static_cast<int>(m), piece.place);
        if (!Take(&in[m], channel.stop(), from, piece.bytes)) co_return Disagree(channel, m);
      }
      // All must agree on whether there is a last arrival: any letter of anyone counts.
      for (std::size_t other = 0; other < members; ++other) {
        for (std::size_t p = 0; p < static_cast<std::size_t>(to[other].pieces); ++p) {
          in_use = in_use || to[other].piece[p].place != kPrivate;
        }
      }
    }
    channel.Release(frame);
  }
  if (in_use) {
    const Frame over = channel.Reserve(1);
    co_await turn.Room(over);
    channel.Publish(over);
    co_await turn.Arrival(over);
    channel.Release(over);
  }
  for (std::size_t m = 0; m < members; ++m) {
    if (!in[m].empty()) co_return Disagree(channel, m);
  }
  co_return Status::Ok();
}

}  // namespace sirtaki::ops::shm
