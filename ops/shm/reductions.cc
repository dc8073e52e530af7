// Reductions over a channel: each element is combined in the order of the members, whoever does it,
// so that the bits depend on nothing else.
#include <algorithm>
#include <array>
#include <cstring>

#include "ops/base/bytes.h"
#include "ops/base/kernels.h"
#include "ops/shm/operations.h"

namespace sirtaki::ops::shm {

using core::Status;

namespace {

// A member says by this that it brings what it keeps of a result to its own memory itself.
constexpr std::int64_t kKept = -3;

// A member tells the others these two places of each segment.
struct Place {
  std::int64_t input = kNothing;
  std::int64_t output = kNothing;
};

// This many segments are told at a time.
constexpr std::size_t kRoundSegments = 2048;

// A vector that is not longer goes in one frame, and every member adds up all of it.
constexpr std::int64_t kWholeBytes = std::int64_t{64} << 10;
// A member's part of a piece of what is longer is no larger, so that it is read while it is in the
// cache.
constexpr std::int64_t kPartBytes = std::int64_t{192} << 10;
// The frame that brings a member's sums of a piece comes this many frames later: ranks that take turns
// on a processor get through as many at a turn.
constexpr std::int64_t kBehind = 2;

bool Seen(std::int64_t place) { return place != kPrivate; }

// Some of the segments, and what the members say of them.
class Round {
 public:
  Round(SharedChannel& channel, std::span<const Segment> segments, const SegmentReduction& how)
      : channel_(channel),
        segments_(segments),
        how_(how),
        element_(BytesOf(how.dtype)),
        members_(static_cast<std::size_t>(channel.size())),
        places_(members_ * segments.size()) {}

  // ---- what the members say ----
  std::int64_t told_bytes() const {
    return static_cast<std::int64_t>(segments_.size() * sizeof(Place));
  }
  void Tell(std::byte* to) const {
    for (const Segment& segment : segments_) {
      const Place place{PlaceOf(segment.input),
                        segment.kept != nullptr ? kKept : PlaceOf(segment.output)};
      std::memcpy(to, &place, sizeof(place));
      to += sizeof(place);
    }
  }
  void HearPlaces(std::size_t member, const std::byte* from) {
    std::memcpy(&places_[member * segments_.size()], from, static_cast<std::size_t>(told_bytes()));
  }

  // ---- which go which way ----
  // Segments that all members see are reduced where they lie; what nobody gives or takes is left out.
  // A segment of which every member keeps a part is reduced by each for itself.
  void Sort() {
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      bool seen = true;
      bool given = false;
      bool taken = false;
      bool kept = false;
      for (std::size_t m = 0; m < members_; ++m) {
        const Place& place = PlaceAt(m, s);
        seen = seen && Seen(place.input) && Seen(place.output);
        given = given || place.input != kNothing;
        taken = taken || (place.output != kNothing && place.output != kKept);
        kept = kept || place.output == kKept;
      }
      if (!given || !(taken || kept)) continue;
      Row& row = !seen || (taken && kept) ? staged_ : kept ? kept_ : direct_;
      row.Add(s, segments_[s].count);
    }
  }
  void StageAll() {
    for (std::size_t s = 0; s < segments_.size(); ++s) staged_.Add(s, segments_[s].count);
    header_ = core::RoundUp(static_cast<std::int64_t>(segments_.size()), kCacheLine);
  }
  bool any_direct() const { return direct_.count() > 0 || kept_.count() > 0; }

  // This member's part of what is reduced where it lies. False: stopped.
  bool ReduceDirect();
  // Reduces what this member keeps. False: stopped.
  bool ReduceKept();

  // ---- what is staged, piece by piece ----
  // A frame brings a piece, and what its member has added up of the piece kBehind frames before: each
  // member adds up a part of every piece, or all where there is but one frame. Returns how many frames
  // there are.
  std::int64_t CutStaged();
  std::int64_t FrameBytes(std::int64_t frame) const {
    return ResultAt(frame) + (divided_ ? Bytes(PieceOf(frame - kBehind)) / size() + kCacheLine : 0);
  }
  // Writes what the others add up of the frame's piece.
  void Give(std::int64_t frame, std::byte* to) const;
  // Finds what the members have written, in a frame that has arrived.
  void Hear(std::int64_t number, const Frame& frame);
  // Adds up this member's part of the piece in the frame heard last. `next`: the frame that brings
  // the sums to the others; null if none does.
  void Reduce(std::int64_t frame, std::byte* next);
  // Takes what the others have added up from the frame heard last.
  void Take(std::int64_t frame) const;

 private:
  // Segments one after the other.
  class Row {
   public:
    void Add(std::size_t segment, std::int64_t count) {
      if (count == 0) return;
      segments_.push_back(segment);
      ends_.push_back(this->count() + count);
    }
    std::int64_t count() const { return ends_.empty() ? 0 : ends_.back(); }
    // function(segment, offset in it, count)
    template <typename Function>
    void ForEach(std::int64_t begin, std::int64_t end, Function function) const {
      auto i = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) -
                                        ends_.begin());
      while (begin < end) {
        const std::int64_t start = i == 0 ? 0 : ends_[i - 1];
        const std::int64_t until = std::min(end, ends_[i]);
        function(segments_[i], begin - start, until - begin);
        begin = until;
        ++i;
      }
    }
    // Where part `i` of `parts` begins: at whole cache lines of the segment.
    std::int64_t Cut(std::int64_t i, std::int64_t parts, std::int64_t element) const {
      const std::int64_t even = count() / parts * i + count() % parts * i / parts;
      if (even == count()) return even;
      const auto segment = std::upper_bound(ends_.begin(), ends_.end(), even) - ends_.begin();
      const std::int64_t start = segment == 0 ? 0 : ends_[static_cast<std::size_t>(segment) - 1];
      const std::int64_t line = kCacheLine / element;
      return start + (even - start) / line * line;
    }

   private:
    std::vector<std::size_t> segments_;
    std::vector<std::int64_t> ends_;
  };

  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };

  static constexpr std::int64_t kCacheLine = 64;

  std::int64_t size() const { return channel_.size(); }
  std::size_t self() const { return static_cast<std::size_t>(channel_.self()); }
  std::int64_t Bytes(const Range& range) const { return (range.end - range.begin) * element_; }
  Range PieceOf(std::int64_t frame) const {
    const std::int64_t begin = std::clamp<std::int64_t>(frame * piece_, 0, staged_.count());
    return {begin, std::clamp<std::int64_t>((frame + 1) * piece_, begin, staged_.count())};
  }
  // The part that a member adds up; it begins at a whole cache line of the frame.
  Range PartOf(const Range& piece, std::size_t member) const {
    const std::int64_t line = kCacheLine / element_;
    const std::int64_t count = piece.end - piece.begin;
    const auto cut = [&](std::int64_t i) {
      return i == size() ? piece.end : piece.begin + count * i / size() / line * line;
    };
    return {cut(static_cast<std::int64_t>(member)), cut(static_cast<std::int64_t>(member) + 1)};
  }
  // Where a frame has its piece, and behind it the sums of an earlier one.
  std::int64_t PieceAt(std::int64_t frame) const { return frame == 0 ? header_ : 0; }
  std::int64_t ResultAt(std::int64_t frame) const { return PieceAt(frame) + Bytes(PieceOf(frame)); }
  void Fill(const Range& range, std::byte* to) const;
  bool IsGiven(std::size_t segment) const {
    for (std::size_t m = 0; m < members_; ++m) {
      if (PlaceAt(m, segment).input != kNothing) return true;
    }
    return false;
  }

  std::int64_t PlaceOf(const void* memory) const {
    return memory == nullptr ? kNothing : channel_.OffsetOf(memory);
  }
  bool ReduceSeen(std::size_t segment, std::int64_t offset, std::int64_t count, std::byte* kept);
  const Place& PlaceAt(std::size_t member, std::size_t segment) const {
    return places_[member * segments_.size() + segment];
  }

  SharedChannel& channel_;
  const std::span<const Segment> segments_;
  const SegmentReduction& how_;
  const std::int64_t element_;
  const std::size_t members_;
  std::vector<Place> places_;  // of each member, all segments
  Row direct_;
  Row kept_;
  Row staged_;
  std::int64_t header_ = 0;  // bytes of the first frame that say whether a member gives
  std::int64_t piece_ = 0;   // elements
  bool divided_ = false;
  std::vector<const std::byte*> heard_;  // each member's frame
  std::vector<const void*> inputs_;      // kept from one piece or segment to the next
  std::vector<void*> outputs_;
};

bool Round::ReduceDirect() {
  const std::int64_t begin = direct_.Cut(channel_.self(), channel_.size(), element_);
  const std::int64_t end = direct_.Cut(channel_.self() + 1, channel_.size(), element_);
  bool going_on = true;
  direct_.ForEach(begin, end, [&](std::size_t s, std::int64_t offset, std::int64_t count) {
    going_on = going_on && ReduceSeen(s, offset, count, nullptr);
  });
  return going_on;
}

bool Round::ReduceKept() {
  bool going_on = true;
  kept_.ForEach(0, kept_.count(), [&](std::size_t s, std::int64_t, std::int64_t) {
    core::KeptPart* const kept = segments_[s].kept;
    if (!going_on || kept == nullptr) return;  // null: this rank has joined
    going_on = ReduceSeen(s, kept->begin / element_, kept->bytes / element_,
                          static_cast<std::byte*>(kept->memory));
    kept->is_there = going_on;
  });
  return going_on;
}

// Reduces some elements of a segment that all members see. `kept`: where they are brought to; null:
// to the outputs of all.
bool Round::ReduceSeen(std::size_t segment, std::int64_t offset, std::int64_t count,
                       std::byte* kept) {
  const std::int64_t step = kUnwatchedBytes / element_;
  for (std::int64_t i = 0; i < count; i += step) {
    if (channel_.stop().raised()) return false;
    inputs_.clear();
    outputs_.clear();
    for (std::size_t m = 0; m < members_; ++m) {
      const Place& place = PlaceAt(m, segment);
      const int member = static_cast<int>(m);
      if (place.input != kNothing) {
        inputs_.push_back(channel_.At(member, place.input) + (offset + i) * element_);
      }
      if (place.output != kNothing && place.output != kKept) {
        outputs_.push_back(channel_.At(member, place.output) + (offset + i) * element_);
      }
    }
    if (kept != nullptr) outputs_.push_back(kept + i * element_);
    ReduceMembers(how_.op, how_.dtype, inputs_, outputs_, std::min(step, count - i), how_.before,
                  how_.after);
  }
  return true;
}

std::int64_t Round::CutStaged() {
  const std::int64_t count = staged_.count();
  if (count == 0) return 0;
  const std::int64_t room = std::min(channel_.frame_bytes() - header_, kPartBytes * (size() + 1));
  divided_ = count * element_ > std::min(room, kWholeBytes);
  piece_ = count;
  if (!divided_) return 1;
  // A frame has room for a piece, and for the largest part of another.
  const std::int64_t line = kCacheLine / element_;
  const std::int64_t most = (room - kCacheLine) * size() / (size() + 1) / kCacheLine * line;
  const std::int64_t pieces = (count + most - 1) / most;
  piece_ = core::RoundUp((count + pieces - 1) / pieces, line);
  return (count + piece_ - 1) / piece_ + kBehind;
}

void Round::Fill(const Range& range, std::byte* to) const {
  staged_.ForEach(range.begin, range.end,
                  [&](std::size_t s, std::int64_t offset, std::int64_t count) {
                    const auto* const input = static_cast<const std::byte*>(segments_[s].input);
                    if (input != nullptr) Copy(to, input + offset * element_, count * element_);
                    to += count * element_;
                  });
}

void Round::Give(std::int64_t frame, std::byte* to) const {
  if (frame == 0 && header_ > 0) {
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      to[s] = std::byte{segments_[s].input != nullptr};
    }
  }
  to += PieceAt(frame);
  const Range piece = PieceOf(frame);
  if (!divided_) return Fill(piece, to);
  const Range mine = PartOf(piece, self());
  Fill({piece.begin, mine.begin}, to);
  Fill({mine.end, piece.end}, to + Bytes({piece.begin, mine.end}));
}

void Round::Hear(std::int64_t number, const Frame& frame) {
  heard_.resize(members_);
  for (std::size_t m = 0; m < members_; ++m) {
    heard_[m] = channel_.Of(static_cast<int>(m), frame);
    for (std::size_t s = 0; number == 0 && header_ > 0 && s < segments_.size(); ++s) {
      places_[m * segments_.size() + s].input = heard_[m][s] == std::byte{0} ? kNothing : kPrivate;
    }
  }
}

void Round::Reduce(std::int64_t frame, std::byte* next) {
  const Range piece = PieceOf(frame);
  const Range part = divided_ ? PartOf(piece, self()) : piece;
  std::int64_t at = PieceAt(frame) + Bytes({piece.begin, part.begin});
  if (next != nullptr) next += ResultAt(frame + kBehind);
  staged_.ForEach(
      part.begin, part.end, [&](std::size_t s, std::int64_t offset, std::int64_t count) {
        const Segment& segment = segments_[s];
        inputs_.clear();
        outputs_.clear();
        for (std::size_t m = 0; m < members_; ++m) {
          if (PlaceAt(m, s).input == kNothing) continue;
          inputs_.push_back(m == self()
                                ? static_cast<const std::byte*>(segment.input) + offset * element_
                                : heard_[m] + at);
        }
        at += count * element_;
        if (segment.output != nullptr) {
          outputs_.push_back(static_cast<std::byte*>(segment.output) + offset * element_);
        }
        if (next != nullptr) {
          outputs_.push_back(next);
          next += count * element_;
        }
        if (inputs_.empty() || outputs_.empty()) return;
        ReduceMembers(how_.op, how_.dtype, inputs_, outputs_, count, how_.before, how_.after);
      });
}

void Round::Take(std::int64_t frame) const {
  for (std::size_t m = 0; divided_ && m < members_; ++m) {
    if (m == self()) continue;
    const Range part = PartOf(PieceOf(frame - kBehind), m);
    const std::byte* from = heard_[m] + ResultAt(frame);
    staged_.ForEach(part.begin, part.end,
                    [&](std::size_t s, std::int64_t offset, std::int64_t count) {
                      auto* const output = static_cast<std::byte*>(segments_[s].output);
                      if (output != nullptr && IsGiven(s)) {
                        Copy(output + offset * element_, from, count * element_);
                      }
                      from += count * element_;
                    });
  }
}

}  // namespace

Steps ReduceSegments(Turn& turn, std::vector<Segment> segments, SegmentReduction how) {
  SharedChannel& channel = turn.channel();
  co_await turn.Comes();
  for (std::size_t first = 0; first < segments.size(); first += kRoundSegments) {
    const std::size_t count = std::min(kRoundSegments, segments.size() - first);
    const bool last_round = first + count == segments.size();
    Round round(channel, std::span(segments).subspan(first, count), how);
    bool in_use = false;  // peers may still be at this member's tensors
    if (channel.direct()) {
      const Frame told = channel.Reserve(round.told_bytes());
      co_await turn.Room(told);
      round.Tell(channel.Mine(told));
      channel.Publish(told);
      co_await turn.Arrival(told);
      for (int m = 0; m < channel.size(); ++m) {
        round.HearPlaces(static_cast<std::size_t>(m), channel.Of(m, told));
      }
      channel.Release(told);
      round.Sort();
      if (!round.ReduceDirect() || !round.ReduceKept()) co_return channel.stop().why();
      in_use = round.any_direct();
    } else {
      round.StageAll();
    }

    const std::int64_t frames = round.CutStaged();
    std::int64_t seen_bytes = 0;
    std::array<Frame, kBehind> under_way;
    for (std::int64_t i = 0; i < frames + kBehind && frames > 0; ++i) {
      Frame& slot = under_way[static_cast<std::size_t>(i % kBehind)];
      const Frame frame = slot;
      if (i < frames) {
        slot = channel.Reserve(round.FrameBytes(i));
        co_await turn.Room(slot);
        round.Give(i, channel.Mine(slot));
      }
      const bool arrives = i >= kBehind;
      if (arrives) {
        co_await turn.Arrival(frame);
        if (Status seen = channel.Verify(frame, seen_bytes); !seen.ok()) co_return seen;
        seen_bytes += frame.bytes;
        round.Hear(i - kBehind, frame);
        round.Reduce(i - kBehind, i < frames ? channel.Mine(slot) : nullptr);
      }
      if (i < frames) {
        channel.Publish(slot);
        if (last_round && i == frames - 1) turn.Pass();
      }
      if (arrives) {
        round.Take(i - kBehind);
        channel.Release(frame);
        in_use = false;
      }
    }
    if (in_use) {
      const Frame over = channel.Reserve(1);
      co_await turn.Room(over);
      channel.Publish(over);
      co_await turn.Arrival(over);
      channel.Release(over);
    }
  }
  co_return Status::Ok();
}

}  // namespace sirtaki::ops::shm
