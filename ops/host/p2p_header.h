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

  // Precondition: at most core::kMaxDimensions dimensions, and a size that fits.
  std::int64_t bytes() const;
  std::string ToString() const;  // "float32 [3, 4]"
  bool operator==(const P2pHeader&) const = default;
};
// The header of a send, or the one that a receive expects.
P2pHeader HeaderOf(const core::Work& work);

// Every header has the same length, as the medium tells no other (little endian):
//   u32 kMessageMagic | u8 dtype | u8 dimensions | u16 0 | i64 bytes | i64 × kMaxDimensions
inline constexpr std::uint32_t kMessageMagic = 0x314d4b53;  // "SKM1"
inline constexpr std::size_t kMessageHeaderBytes = 16 + 8 * core::kMaxDimensions;
using P2pHeaderBytes = std::array<std::byte, kMessageHeaderBytes>;

// Precondition: that of bytes().
P2pHeaderBytes Encode(const P2pHeader& header);

// Survives any bytes. kProtocol: no correct peer sends this; the text says why.
core::Status Decode(std::span<const std::byte, kMessageHeaderBytes> bytes, P2pHeader* header);

}  // namespace sirtaki::ops
