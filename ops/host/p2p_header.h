// A header goes before the bytes of a message between two ranks, and says what they are.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"
#include "core/engine/work.h"
#include "core/protocol/wire.h"

namespace sirtaki::ops {

struct P2pHeader {
  core::DType dtype = core::DType::kU8;
  std::vector<std::int64_t> shape;
  // A send that could go another way than the host's says this of it, and waits for an answer; 0:
  // it goes through the host.
  std::uint16_t offer = 0;

  // Precondition: at most core::kMaxDimensions dimensions, and a size that fits.
  std::int64_t bytes() const;
  std::string ToString() const;  // "float32 [3, 4]"
  // Equal headers are those of the same tensor, whatever is offered.
  bool operator==(const P2pHeader& other) const {
    return dtype == other.dtype && shape == other.shape;
  }
};
// The header of a send, or the one that a receive expects.
P2pHeader HeaderOf(const core::Work& work);

// Every header has the same length, as the medium tells no other (little endian):
//   u32 kMessageMagic | u8 dtype | u8 dimensions | u16 offer | i64 bytes | i64 × kMaxDimensions
inline constexpr std::uint32_t kMessageMagic = 0x314d4b53;  // "SKM1"
inline constexpr std::size_t kMessageHeaderBytes = 16 + 8 * core::kMaxDimensions;
using P2pHeaderBytes = std::array<std::byte, kMessageHeaderBytes>;

// Precondition: that of bytes().
P2pHeaderBytes Encode(const P2pHeader& header);

// Survives any bytes. kProtocol: no correct peer sends this; the text says why.
core::Status Decode(std::span<const std::byte, kMessageHeaderBytes> bytes, P2pHeader* header);

// The answer of a receiver to a send that offers another way.
struct P2pAnswer {
  enum class Kind : std::uint8_t {
    kHost,   // the message goes through the host
    kMeet,   // it goes through the host, and `word` says how the two come to the other way
    kGo,     // it goes the other way, behind those from this sender that were told so before
    kNever,  // it goes through the host, and there is no other way
  };
  Kind kind = Kind::kHost;
  std::array<std::byte, 128> word{};
};

// The answers of a rank to another one have one tag, so each says whose it is: a line of messages
// has one unanswered offer at most (little endian):
//   u32 kAnswerMagic | u8 kind | u8 0 | u16 tag | 128 bytes word
inline constexpr std::uint32_t kAnswerMagic = 0x31414b53;  // "SKA1"
inline constexpr std::size_t kAnswerBytes = 8 + sizeof(P2pAnswer::word);
using P2pAnswerBytes = std::array<std::byte, kAnswerBytes>;

P2pAnswerBytes Encode(const P2pAnswer& answer, int tag);

// Survives any bytes, as above.
core::Status Decode(std::span<const std::byte, kAnswerBytes> bytes, P2pAnswer* answer, int* tag);

}  // namespace sirtaki::ops
