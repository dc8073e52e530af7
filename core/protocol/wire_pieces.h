// The two directions of a message's fields. Each has the same functions: a MessageWriter appends the
// value that it is given, a MessageReader fills it in. So core/protocol/wire.cc, which alone includes
// this, names every field once. The grammar is at its top.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/byte_codec.h"
#include "core/base/check.h"
#include "core/base/digest.h"
#include "core/base/rank_ranges.h"
#include "core/protocol/wire.h"

namespace sirtaki::core {

inline constexpr std::uint64_t kMaxRank = std::numeric_limits<int>::max();

class MessageWriter {
 public:
  static constexpr bool kReads = false;
  template <typename T>
  using Of = const T;

  bool ok() const { return true; }
  // The caller gave what MessageReader would refuse.
  void Fail(const char* field, const std::string& what) const {
    SIRTAKI_CHECK(false, std::string(field) + " " + what);
  }
  void Check(bool holds, const char* text) const { SIRTAKI_CHECK(holds, text); }

  // A byte of at most `max`: an enumeration, a choice.
  template <typename T>
  void Byte(const char* field, T value, int max) {
    if (static_cast<int>(value) > max) Fail(field, "is not allowed here");
    out_.Byte(static_cast<std::uint8_t>(value));
  }
  // A varint of what T holds that is not negative, at most `max`; less than 0 goes as 0.
  template <typename T>
  void Number(const char* /*field*/, T value, std::uint64_t /*max*/ = 0) {
    out_.Varint(static_cast<std::uint64_t>(std::max(value, T{0})));
  }
  template <typename T>
  void Signed(const char* /*field*/, T value) {
    out_.Zigzag(value);
  }
  template <typename T>
  void Fixed(const char* /*field*/, T value) {
    out_.Fixed64(std::bit_cast<std::uint64_t>(value));
  }

  void Text(const char* /*field*/, const std::string& text) {
    if (text.size() <= kMaxTextBytes) {
      out_.Text(text);
      return;
    }
    constexpr std::string_view kCut = "...";
    std::size_t end = kMaxTextBytes - kCut.size();
    // The cut is not in the middle of a UTF-8 character: its later bytes begin with the bits 10.
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0U) == 0x80U) --end;
    out_.Text(text.substr(0, end).append(kCut));
  }

  void Text(const char* /*field*/, const Name& name) {
    SIRTAKI_CHECK(name.text().size() <= kMaxNameBytes, "names are checked at submission");
    out_.Text(name.text());
  }

  // Elements beyond `max` are left out.
  template <typename T, typename Each>
  void List(const char* /*field*/, const std::vector<T>& list, std::size_t /*min_bytes*/,
            std::size_t max, const Each& each) {
    const std::size_t count = std::min(list.size(), max);
    out_.Varint(count);
    for (std::size_t i = 0; i < count; ++i) each(list[i]);
  }

  void Ranks(const char* /*field*/, const RankRanges& ranks) {
    out_.Varint(ranks.ranges().size());
    std::int64_t next = 0;  // the lowest rank that the next range can begin with
    for (const RankRange& range : ranks.ranges()) {
      SIRTAKI_CHECK(range.first >= next, "ranks are not negative");
      out_.Varint(static_cast<std::uint64_t>(range.first - next));
      out_.Varint(static_cast<std::uint64_t>(std::int64_t{range.last} - range.first));
      next = std::int64_t{range.last} + 2;
    }
  }

  void Bits(const char* /*field*/, const std::vector<bool>& bits) {
    out_.Varint(bits.size());
    std::uint8_t byte = 0;
    for (std::size_t i = 0; i < bits.size(); ++i) {
      if (bits[i]) byte = static_cast<std::uint8_t>(byte | (1U << (i % 8)));
      if (i % 8 == 7 || i + 1 == bits.size()) out_.Byte(std::exchange(byte, 0));
    }
  }

  void Digest() { out_.Fixed64(core::Digest(out_.bytes().data(), out_.bytes().size())); }
  Bytes Take() { return out_.Take(); }

 private:
  ByteWriter out_;
};

class MessageReader {
 public:
  static constexpr bool kReads = true;
  template <typename T>
  using Of = T;

  explicit MessageReader(std::span<const std::byte> bytes) : in_(bytes) {}

  bool ok() const { return in_.ok(); }
  void Fail(const char* field, const std::string& what) { in_.Fail(field, what); }
  void Check(bool /*holds*/, const char* /*text*/) const {}

  template <typename T>
  void Byte(const char* field, T& value, int max) {
    value = static_cast<T>(in_.ByteUpTo(field, static_cast<std::uint8_t>(max)));
  }
  template <typename T>
  void Number(const char* field, T& value, std::uint64_t max = std::numeric_limits<T>::max()) {
    value = static_cast<T>(in_.Varint(field, max));
  }
  template <typename T>
  void Signed(const char* field, T& value) {
    const std::int64_t read = in_.Zigzag(field);
    if (!std::in_range<T>(read)) {
      in_.Fail(field, "does not fit into " + std::to_string(8 * sizeof(T)) + " bits");
    }
    value = static_cast<T>(read);
  }
  template <typename T>
  void Fixed(const char* field, T& value) {
    value = std::bit_cast<T>(in_.Fixed64(field));
  }
  void Text(const char* field, std::string& text) { text = in_.Text(field, kMaxTextBytes); }
  void Text(const char* field, Name& name) { name = in_.Text(field, kMaxNameBytes); }

  template <typename T, typename Each>
  void List(const char* field, std::vector<T>& list, std::size_t min_bytes, std::size_t max,
            const Each& each) {
    const std::size_t count = in_.Count(field, min_bytes, max);
    list.reserve(count);  // no more than bytes follow
    for (std::size_t i = 0; i < count && in_.ok(); ++i) each(list.emplace_back());
  }

  void Ranks(const char* field, RankRanges& ranks) {
    const std::size_t count = in_.Count(field, 2);
    std::uint64_t next = 0;
    for (std::size_t i = 0; i < count && in_.ok(); ++i) {
      // Both below 2^31, so that no sum wraps.
      const std::uint64_t first = next + in_.Varint(field, kMaxRank);
      const std::uint64_t last = first + in_.Varint(field, kMaxRank);
      if (last > kMaxRank) return in_.Fail(field, "go up to " + std::to_string(last));
      ranks.Add(RankRanges::Span(static_cast<int>(first), static_cast<int>(last)));
      next = last + 2;
    }
  }

  void Bits(const char* field, std::vector<bool>& bits) {
    // Eight bits a byte, so the count is held against the bytes by hand.
    const std::uint64_t count = in_.Varint(field);
    if (count == 0) return bits.clear();
    if (count / 8 > in_.remaining()) {
      return in_.Fail(field, "are " + std::to_string(count) + ", more than follow");
    }
    bits.resize(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < bits.size() && in_.ok(); i += 8) {
      const std::uint8_t byte = in_.Byte(field);
      for (std::size_t bit = 0; bit < 8; ++bit) {
        const bool set = ((byte >> bit) & 1) != 0;
        if (i + bit < bits.size()) {
          bits[i + bit] = set;
        } else if (set) {
          in_.Fail(field, "are not padded with zeros");
        }
      }
    }
  }

  Status End() {
    in_.ExpectEnd();
    return in_.status();
  }

 private:
  ByteReader in_;
};

}  // namespace sirtaki::core
