// The tags of the wire format, shared by wire.cc and wire_decode.cc and by nobody else. The grammar
// is at the top of wire.cc.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "core/base/status.h"

namespace sirtaki::core::wire_format {

inline constexpr std::uint8_t kMagic = 0x53;
inline constexpr std::uint8_t kVersion = 5;
inline constexpr std::uint64_t kMaxRank = std::numeric_limits<int>::max();

enum BodyTag : std::uint8_t {
  kReport,
  kStream,
  kQuery,
  kAnswer,
  kPing,
  kPong,
  kFault,
  kByeAck,
  kByeConfirm,
};
enum ItemTag : std::uint8_t { kReady, kJoined, kLeft, kStalled };
enum EntryTag : std::uint8_t {
  kRun,
  kFail,
  kEvict,
  kJoinDone,
  kBye,
  kAddSetTag,
  kRemoveSetTag,
  kLimitsTag,
  kAssemblyTag,
};
enum VariantTag : std::uint8_t { kValid, kInvalidOnly, kInvalidRequest };
enum AskedTag : std::uint8_t {
  kAskCollective,
  kAskAddSet,
  kAskRemoveSet,
  kAskLimits,
  kAskAssembly
};
enum KeyTag : std::uint8_t { kNoKey, kNamedKey, kUnnamedKey, kBucketKey };
enum SignatureField : std::uint8_t {
  kSlot = 1,
  kRoot = 2,
  kPrescale = 4,
  kPostscale = 8,
  kLayout = 16,
  kWire = 32,
  kParts = 64,
  kRound = 128,
  kAllFields = 255,
};

inline constexpr auto kLastCode = static_cast<std::uint8_t>(StatusCode::kUnsupported);
inline constexpr std::uint64_t kDefaultFactor = std::bit_cast<std::uint64_t>(1.0);

}  // namespace sirtaki::core::wire_format
