#include "core/base/byte_codec.h"

namespace sirtaki::core {

void ByteWriter::Varint(std::uint64_t value) {
  while (value >= 0x80) {
    Byte(static_cast<std::uint8_t>(value | 0x80));
    value >>= 7;
  }
  Byte(static_cast<std::uint8_t>(value));
}

void ByteWriter::Zigzag(std::int64_t value) {
  const auto bits = static_cast<std::uint64_t>(value);
  Varint(value < 0 ? ~(bits << 1) : bits << 1);
}

void ByteWriter::Fixed64(std::uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) Byte(static_cast<std::uint8_t>(value >> shift));
}

void ByteWriter::Text(std::string_view text) {
  Varint(text.size());
  const auto bytes = std::as_bytes(std::span(text.data(), text.size()));
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

void ByteReader::Fail(const char* field, const std::string& what) {
  if (!status_.ok()) return;
  status_ = Status(StatusCode::kProtocol,
                   std::string(field) + " at byte " + std::to_string(start_) + " " + what);
  next_ = bytes_.size();
}

bool ByteReader::Need(const char* field, std::size_t count) {
  if (!ok()) return false;
  if (remaining() >= count) return true;
  Fail(field, "is cut off");
  return false;
}

std::uint8_t ByteReader::Byte(const char* field) {
  start_ = next_;
  if (!Need(field, 1)) return 0;
  return std::to_integer<std::uint8_t>(bytes_[next_++]);
}

std::uint8_t ByteReader::WrongByte(const char* field, std::uint8_t max) {
  const std::uint8_t value = Byte(field);
  Fail(field, "is " + std::to_string(value) + ", at most " + std::to_string(max) + " is known");
  return 0;
}

std::uint64_t ByteReader::LongVarint(const char* field, std::uint64_t max) {
  start_ = next_;
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    if (!Need(field, 1)) return 0;
    const auto byte = std::to_integer<std::uint8_t>(bytes_[next_++]);
    // The tenth byte has room for the one bit that is left.
    if (shift == 63 && byte > 1) {
      Fail(field, "does not fit into 64 bits");
      return 0;
    }
    value |= std::uint64_t{byte & 0x7fU} << shift;
    if ((byte & 0x80) != 0) continue;
    if (byte == 0 && shift > 0) {
      Fail(field, "is not in its shortest form");
      return 0;
    }
    break;
  }
  if (value > max) {
    Fail(field, "is " + std::to_string(value) + ", allowed is at most " + std::to_string(max));
    return 0;
  }
  return value;
}

std::int64_t ByteReader::Zigzag(const char* field) {
  const std::uint64_t bits = Varint(field);
  return static_cast<std::int64_t>((bits & 1) != 0 ? ~(bits >> 1) : bits >> 1);
}

std::uint64_t ByteReader::Fixed64(const char* field) {
  start_ = next_;
  if (!Need(field, 8)) return 0;
  std::uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 8) {
    value |= std::to_integer<std::uint64_t>(bytes_[next_++]) << shift;
  }
  return value;
}

std::string ByteReader::Text(const char* field, std::size_t max_bytes) {
  const std::uint64_t size = Varint(field, max_bytes);
  if (!Need(field, static_cast<std::size_t>(size))) return {};
  const auto* data = reinterpret_cast<const char*>(bytes_.data() + next_);
  next_ += static_cast<std::size_t>(size);
  return {data, static_cast<std::size_t>(size)};
}

std::size_t ByteReader::Count(const char* field, std::size_t min_bytes, std::size_t max) {
  const std::uint64_t count = Varint(field, max);
  if (count <= remaining() / min_bytes) return static_cast<std::size_t>(count);
  Fail(field, "promises " + std::to_string(count) + " elements, but only " +
                  std::to_string(remaining()) + " bytes follow");
  return 0;
}

void ByteReader::ExpectEnd() {
  start_ = next_;
  if (!ok() || remaining() == 0) return;
  Fail("message", "has " + std::to_string(remaining()) + " more bytes");
}

}  // namespace sirtaki::core
