#include "ops/host/p2p_header.h"

#include <algorithm>

#include "core/base/check.h"

namespace sirtaki::ops {
namespace {

using core::Status;
using core::StatusCode;

constexpr std::size_t kDTypeAt = 4;
constexpr std::size_t kDimensionsAt = 5;
constexpr std::size_t kOfferAt = 6;
constexpr std::size_t kBytesAt = 8;
constexpr std::size_t kShapeAt = 16;
constexpr std::size_t kKindAt = 4;
constexpr std::size_t kTagAt = 6;
constexpr std::size_t kWordAt = 8;

void Put(std::span<std::byte> bytes, std::size_t at, std::uint64_t value, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) bytes[at + i] = static_cast<std::byte>(value >> (8 * i));
}

std::uint64_t Get(std::span<const std::byte> bytes, std::size_t at, std::size_t size) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < size; ++i) {
    value |= std::to_integer<std::uint64_t>(bytes[at + i]) << (8 * i);
  }
  return value;
}

// False if a dimension is negative or the size does not fit.
bool Size(core::DType dtype, std::span<const std::int64_t> shape, std::int64_t* bytes) {
  *bytes = static_cast<std::int64_t>(core::SizeOf(dtype));
  bool fits = true;
  bool empty = false;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0) return false;
    if (dimension == 0) {
      empty = true;  // the others may then be anything
    } else if (fits) {
      fits = !__builtin_mul_overflow(*bytes, dimension, bytes);
    }
  }
  if (empty) *bytes = 0;
  return fits || empty;
}

Status Nonsense(const std::string& what) {
  return {StatusCode::kProtocol, "the header of a message is wrong: it says " + what};
}

}  // namespace

std::int64_t P2pHeader::bytes() const {
  std::int64_t bytes = 0;
  SIRTAKI_CHECK(shape.size() <= core::kMaxDimensions && Size(dtype, shape, &bytes),
                "a shape that a tensor can have");
  return bytes;
}

std::string P2pHeader::ToString() const {
  std::string text(core::DTypeName(dtype));
  text += " [";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

P2pHeader HeaderOf(const core::Work& work) {
  return {.dtype = work.request.signature()->dtype, .shape = work.request.signature()->shape};
}

P2pHeaderBytes Encode(const P2pHeader& header) {
  P2pHeaderBytes bytes{};
  Put(bytes, kBytesAt, static_cast<std::uint64_t>(header.bytes()), 8);
  Put(bytes, 0, kMessageMagic, 4);
  Put(bytes, kDTypeAt, static_cast<std::uint64_t>(header.dtype), 1);
  Put(bytes, kDimensionsAt, header.shape.size(), 1);
  Put(bytes, kOfferAt, header.offer, 2);
  for (std::size_t i = 0; i < header.shape.size(); ++i) {
    Put(bytes, kShapeAt + 8 * i, static_cast<std::uint64_t>(header.shape[i]), 8);
  }
  return bytes;
}

Status Decode(std::span<const std::byte, kMessageHeaderBytes> bytes, P2pHeader* header) {
  if (Get(bytes, 0, 4) != kMessageMagic) return Nonsense("that this is not a message");
  const std::uint64_t dtype = Get(bytes, kDTypeAt, 1);
  if (dtype >= static_cast<std::uint64_t>(core::kDTypeCount)) {
    return Nonsense("data type " + std::to_string(dtype));
  }
  const std::uint64_t dimensions = Get(bytes, kDimensionsAt, 1);
  if (dimensions > core::kMaxDimensions) {
    return Nonsense(std::to_string(dimensions) + " dimensions");
  }
  header->dtype = static_cast<core::DType>(dtype);
  header->offer = static_cast<std::uint16_t>(Get(bytes, kOfferAt, 2));
  header->shape.clear();
  for (std::size_t i = 0; i < core::kMaxDimensions; ++i) {
    const auto dimension = static_cast<std::int64_t>(Get(bytes, kShapeAt + 8 * i, 8));
    if (i < dimensions) {
      header->shape.push_back(dimension);
    } else if (dimension != 0) {
      return Nonsense("more than its " + std::to_string(dimensions) + " dimensions");
    }
  }
  std::int64_t size = 0;
  const auto said = static_cast<std::int64_t>(Get(bytes, kBytesAt, 8));
  if (!Size(header->dtype, header->shape, &size) || size != said) {
    return Nonsense(std::to_string(said) + " bytes of " + header->ToString());
  }
  return Status::Ok();
}

P2pAnswerBytes Encode(const P2pAnswer& answer, int tag) {
  P2pAnswerBytes bytes{};
  Put(bytes, 0, kAnswerMagic, 4);
  Put(bytes, kKindAt, static_cast<std::uint64_t>(answer.kind), 1);
  Put(bytes, kTagAt, static_cast<std::uint64_t>(tag), 2);
  std::copy(answer.word.begin(), answer.word.end(), bytes.begin() + kWordAt);
  return bytes;
}

Status Decode(std::span<const std::byte, kAnswerBytes> bytes, P2pAnswer* answer, int* tag) {
  const std::uint64_t kind = Get(bytes, kKindAt, 1);
  if (Get(bytes, 0, 4) != kAnswerMagic || Get(bytes, kKindAt + 1, 1) != 0 ||
      kind > static_cast<std::uint64_t>(P2pAnswer::Kind::kNever)) {
    return {StatusCode::kProtocol, "the answer to a message is wrong"};
  }
  answer->kind = static_cast<P2pAnswer::Kind>(kind);
  *tag = static_cast<int>(Get(bytes, kTagAt, 2));
  std::copy(bytes.begin() + kWordAt, bytes.end(), answer->word.begin());
  return Status::Ok();
}

}  // namespace sirtaki::ops
