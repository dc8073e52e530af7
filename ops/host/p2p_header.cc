#include "ops/host/p2p_header.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "core/base/check.h"
#include "core/base/text.h"

namespace sirtaki::ops {
namespace {

using core::Status;
using core::StatusCode;

static_assert(std::endian::native == std::endian::little, "numbers go as they lie in memory");

struct HeaderFields {
  std::uint32_t magic = kMessageMagic;
  std::uint8_t dtype = 0;
  std::uint8_t dimensions = 0;
  std::uint16_t offer = 0;
  std::int64_t bytes = 0;
  std::array<std::int64_t, core::kMaxDimensions> shape{};
};
struct AnswerFields {
  std::uint32_t magic = kAnswerMagic;
  std::uint8_t kind = 0;
  std::uint8_t zero = 0;
  std::uint16_t tag = 0;
  decltype(P2pAnswer::word) word{};
};

template <class Fields, std::size_t kSize>
Fields FieldsOf(std::span<const std::byte, kSize> bytes) {
  Fields fields;
  static_assert(sizeof fields == kSize && std::has_unique_object_representations_v<Fields>);
  std::memcpy(&fields, bytes.data(), kSize);
  return fields;
}

// False if a dimension is negative or the size does not fit.
bool Size(core::DType dtype, std::span<const std::int64_t> shape, std::int64_t* bytes) {
  *bytes = BytesOf(dtype);
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
  return std::string(core::DTypeName(dtype)) + " " + core::ShapeText(shape);
}

P2pHeader HeaderOf(const core::Work& work) {
  return {.dtype = work.request.signature()->dtype, .shape = work.request.signature()->shape};
}

P2pHeaderBytes Encode(const P2pHeader& header) {
  HeaderFields fields{.dtype = static_cast<std::uint8_t>(header.dtype),
                      .dimensions = static_cast<std::uint8_t>(header.shape.size()),
                      .offer = header.offer,
                      .bytes = header.bytes()};
  std::copy(header.shape.begin(), header.shape.end(), fields.shape.begin());
  return std::bit_cast<P2pHeaderBytes>(fields);
}

Status Decode(std::span<const std::byte, kMessageHeaderBytes> bytes, P2pHeader* header) {
  const auto fields = FieldsOf<HeaderFields>(bytes);
  if (fields.magic != kMessageMagic) return Nonsense("that this is not a message");
  if (fields.dtype >= core::kDTypeCount) {
    return Nonsense("data type " + std::to_string(fields.dtype));
  }
  if (fields.dimensions > core::kMaxDimensions) {
    return Nonsense(std::to_string(fields.dimensions) + " dimensions");
  }
  header->dtype = static_cast<core::DType>(fields.dtype);
  header->offer = fields.offer;
  const auto end = fields.shape.begin() + fields.dimensions;
  header->shape.assign(fields.shape.begin(), end);
  if (std::any_of(end, fields.shape.end(), [](std::int64_t dimension) { return dimension != 0; })) {
    return Nonsense("more than its " + std::to_string(fields.dimensions) + " dimensions");
  }
  std::int64_t size = 0;
  if (!Size(header->dtype, header->shape, &size) || size != fields.bytes) {
    return Nonsense(std::to_string(fields.bytes) + " bytes of " + header->ToString());
  }
  return Status::Ok();
}

P2pAnswerBytes Encode(const P2pAnswer& answer, int tag) {
  return std::bit_cast<P2pAnswerBytes>(AnswerFields{.kind = static_cast<std::uint8_t>(answer.kind),
                                                    .tag = static_cast<std::uint16_t>(tag),
                                                    .word = answer.word});
}

Status Decode(std::span<const std::byte, kAnswerBytes> bytes, P2pAnswer* answer, int* tag) {
  const auto fields = FieldsOf<AnswerFields>(bytes);
  if (fields.magic != kAnswerMagic || fields.zero != 0 ||
      fields.kind > static_cast<std::uint8_t>(P2pAnswer::Kind::kNever)) {
    return {StatusCode::kProtocol, "the answer to a message is wrong"};
  }
  *answer = {static_cast<P2pAnswer::Kind>(fields.kind), fields.word};
  *tag = fields.tag;
  return Status::Ok();
}

}  // namespace sirtaki::ops
