// The smallest pieces of every format of ours: bytes, variable-length integers, texts.
// core/protocol/wire and core/config/config are built of them. A reader survives any bytes: the
// first thing that is wrong is kept, with the field's name and its offset, and every read after it
// gives zero.
//
//   varint  := an unsigned integer, 7 bits a byte, lowest first, the high bit on all bytes but the
//              last; at most 10 bytes, in the shortest form only
//   zigzag  := varint of a signed integer, folded as 0, -1, 1, -2, …
//   fixed64 := 8 bytes, lowest first
//   text    := varint length, then that many bytes
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::core {

class ByteWriter {
 public:
  void Byte(std::uint8_t value) { bytes_.push_back(std::byte{value}); }
  void Varint(std::uint64_t value);
  void Zigzag(std::int64_t value);
  void Fixed64(std::uint64_t value);
  void Text(std::string_view text);

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

// Reads from memory that outlives it. `field` names what is read, for the error's text.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  explicit ByteReader(std::string_view bytes)
      : ByteReader(std::as_bytes(std::span(bytes.data(), bytes.size()))) {}

  std::uint8_t Byte(const char* field);
  // A byte of at most `max`: enumerations.
  std::uint8_t ByteUpTo(const char* field, std::uint8_t max) {
    if (next_ < bytes_.size()) {  // which it is not after an error
      const auto value = std::to_integer<std::uint8_t>(bytes_[next_]);
      if (value <= max) {
        start_ = next_++;
        return value;
      }
    }
    return WrongByte(field, max);
  }
  std::uint64_t Varint(const char* field,
                       std::uint64_t max = std::numeric_limits<std::uint64_t>::max()) {
    if (next_ < bytes_.size()) {  // which it is not after an error; most have one byte
      const auto first = std::to_integer<std::uint64_t>(bytes_[next_]);
      if (first < 0x80U && first <= max) {
        start_ = next_++;
        return first;
      }
    }
    return LongVarint(field, max);
  }
  std::int64_t Zigzag(const char* field);
  std::uint64_t Fixed64(const char* field);
  std::string Text(const char* field, std::size_t max_bytes);
  // A number of elements that take at least `min_bytes` each: no more than can still follow, so
  // that a container of that size may be reserved.
  std::size_t Count(const char* field, std::size_t min_bytes,
                    std::size_t max = std::numeric_limits<std::size_t>::max());

  // Records an error at the place where the last value began. Later ones do not replace it.
  void Fail(const char* field, const std::string& what);
  // Nothing may follow.
  void ExpectEnd();

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }  // kProtocol
  std::size_t remaining() const { return bytes_.size() - next_; }

 private:
  bool Need(const char* field, std::size_t count);
  std::uint8_t WrongByte(const char* field, std::uint8_t max);
  std::uint64_t LongVarint(const char* field, std::uint64_t max);  // or one that is wrong

  std::span<const std::byte> bytes_;
  std::size_t next_ = 0;
  std::size_t start_ = 0;  // of the value read last
  Status status_;
};

}  // namespace sirtaki::core
