// Reductions over a channel: each element is combined in the order of the members, whoever does it,
// so that the bits depend on nothing else.
#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/base/bytes.h"
#include "ops/base/kernels.h"
#include "ops/shm/operations.h"

namespace sirtaki::ops::shm {

using core::Status;

namespace {

// What one member says of a segment.
struct Place {
  std::int64_t input = kNothing;
  std::int64_t output = kNothing;
};

// So many segments are told at a time.
constexpr std::size_t kRoundSegments = 2048;

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
      const Place place{PlaceOf(segment.input), PlaceOf(segment.output)};
      std::memcpy(to, &place, sizeof(place));
      to += sizeof(place);
    }
  }
  void Hear(std::size_t member, const std::byte* from) {
    std::memcpy(&places_[member * segments_.size()], from, static_cast<std::size_t>(told_bytes()));
  }

  // Whether every member gives; where nothing is said but that.
  std::int64_t given_bytes() const {
    return static_cast<std::int64_t>(segments_.size() + 15) / 16 * 16;
  }
  void TellGiven(std::byte* to) const {
    for (const Segment& segment : segments_) *to++ = std::byte{segment.input != nullptr};
  }
  void HearGiven(std::size_t member, const std::byte* from) {
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      places_[member * segments_.size() + s].input = from[s] == std::byte{0} ? kNothing : kPrivate;
    }
  }

  // ---- which go which way ----
  // Those that all members see are reduced where they lie; what nobody gives or takes is left out.
  void Sort() {
    for (std::size_t s = 0; s < segments_.size(); ++s) {
      bool seen = true;
      bool given = false;
      bool taken = false;
      for (std::size_t m = 0; m < members_; ++m) {
        const Place& place = PlaceAt(m, s);
        seen = seen && Seen(place.input) && Seen(place.output);
        given = given || place.input != kNothing;
        taken = taken || place.output != kNothing;
      }
      if (given && taken) (seen ? direct_ : staged_).Add(s, segments_[s].count);
    }
  }
  void StageAll() {
    for (std::size_t s = 0; s < segments_.size(); ++s) staged_.Add(s, segments_[s].count);
  }
  bool any_direct() const { return direct_.count() > 0; }
  std::int64_t staged_count() const { return staged_.count(); }

  // This member's part of what is reduced where it lies. False: stopped.
  bool ReduceDirect() const;

  // ---- elements [begin, end) of what is staged ----
  void Fill(std::int64_t begin, std::int64_t end, std::byte* to) const {
    staged_.ForEach(begin, end, [&](std::size_t s, std::int64_t offset, std::int64_t count) {
      const auto* const input = static_cast<const std::byte*>(segments_[s].input);
      if (input != nullptr) Copy(to, input + offset * element_, count * element_);
      to += count * element_;
    });
  }
  // `from`: where each member's lie.
  void Reduce(std::int64_t begin, std::int64_t end, const std::vector<const std::byte*>& from) {
    std::int64_t at = 0;
    staged_.ForEach(begin, end, [&](std::size_t s, std::int64_t offset, std::int64_t count) {
      inputs_.clear();
      for (std::size_t m = 0; m < members_; ++m) {
        if (PlaceAt(m, s).input != kNothing) inputs_.push_back(from[m] + at);
      }
      at += count * element_;
      if (inputs_.empty() || segments_[s].output == nullptr) return;
      void* const output = static_cast<std::byte*>(segments_[s].output) + offset * element_;
      ReduceMembers(how_.op, how_.dtype, inputs_, {&output, 1}, count, how_.before, how_.after);
    });
  }

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

  static constexpr std::int64_t kCacheLine = 64;

  std::int64_t PlaceOf(const void* memory) const {
    return memory == nullptr ? kNothing : channel_.OffsetOf(memory);
  }
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
  Row staged_;
  std::vector<const void*> inputs_;  // kept from one piece to the next
};

bool Round::ReduceDirect() const {
  const std::int64_t begin = direct_.Cut(channel_.self(), channel_.size(), element_);
  const std::int64_t end = direct_.Cut(channel_.self() + 1, channel_.size(), element_);
  const std::int64_t step = kUnwatchedBytes / element_;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  bool going_on = true;
  direct_.ForEach(begin, end, [&](std::size_t s, std::int64_t offset, std::int64_t count) {
    for (std::int64_t i = offset; i < offset + count; i += step) {
      going_on = going_on && !channel_.stop().raised();
      if (!going_on) return;
      inputs.clear();
      outputs.clear();
      for (std::size_t m = 0; m < members_; ++m) {
        const Place& place = PlaceAt(m, s);
        const int member = static_cast<int>(m);
        if (place.input != kNothing) {
          inputs.push_back(channel_.At(member, place.input) + i * element_);
        }
        if (place.output != kNothing) {
          outputs.push_back(channel_.At(member, place.output) + i * element_);
        }
      }
      ReduceMembers(how_.op, how_.dtype, inputs, outputs, std::min(step, offset + count - i),
                    how_.before, how_.after);
    }
  });
  return going_on;
}

}  // namespace

Steps ReduceSegments(Turn& turn, std::vector<Segment> segments, SegmentReduction how) {
  SharedChannel& channel = turn.channel();
  const auto members = static_cast<std::size_t>(channel.size());
  const std::int64_t element = BytesOf(how.dtype);
  std::vector<const std::byte*> parts(members);
  co_await turn.Comes();
  for (std::size_t first = 0; first < segments.size(); first += kRoundSegments) {
    const std::size_t count = std::min(kRoundSegments, segments.size() - first);
    const bool last_round = first + count == segments.size();
    Round round(channel, std::span(segments).subspan(first, count), how);
    std::int64_t ahead = 0;  // of the elements in the first frame
    bool in_use = false;     // peers may still be at this member's tensors
    if (channel.direct()) {
      const Frame told = channel.Reserve(round.told_bytes());
      co_await turn.Room(told);
      round.Tell(channel.Mine(told));
      channel.Publish(told);
      co_await turn.Arrival(told);
      for (std::size_t m = 0; m < members; ++m) {
        round.Hear(m, channel.Of(static_cast<int>(m), told));
      }
      channel.Release(told);
      round.Sort();
      if (!round.ReduceDirect()) co_return channel.stop().why();
      in_use = round.any_direct();
    } else {
      round.StageAll();
      ahead = round.given_bytes();
    }

    const std::int64_t total = round.staged_count();
    const std::int64_t chunk = (channel.frame_bytes() - ahead) / element;
    Frame next;
    for (std::int64_t begin = -chunk; begin < total && total > 0; begin += chunk) {
      const Frame frame = next;
      const std::int64_t following = begin + chunk;
      if (following < total) {
        const std::int64_t end = std::min(following + chunk, total);
        const std::int64_t header = following == 0 ? ahead : 0;
        next = channel.Reserve(header + (end - following) * element);
        co_await turn.Room(next);
        if (header > 0) round.TellGiven(channel.Mine(next));
        round.Fill(following, end, channel.Mine(next) + header);
        channel.Publish(next);
        if (last_round && end == total) turn.Pass();
      }
      if (begin < 0) continue;
      co_await turn.Arrival(frame);
      if (Status seen = channel.Verify(frame, begin * element); !seen.ok()) co_return seen;
      const std::int64_t header = begin == 0 ? ahead : 0;
      for (std::size_t m = 0; m < members; ++m) {
        const std::byte* const theirs = channel.Of(static_cast<int>(m), frame);
        if (header > 0) round.HearGiven(m, theirs);
        parts[m] = theirs + header;
      }
      round.Reduce(begin, std::min(following, total), parts);
      channel.Release(frame);
      in_use = false;
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
