// Message <-> bytes. The byte grammar is written out at the top of wire.cc. Decode survives any
// bytes: it either gives a message that satisfies every bound below or says what is wrong and
// where. Both are pure; any thread may call them.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "core/protocol/message.h"

namespace sirtaki::core {

using Bytes = std::vector<std::byte>;

inline constexpr std::size_t kMaxNameBytes =
    4096;  // a tensor's name; checked at submission as well
inline constexpr std::size_t kMaxTextBytes = 1 << 16;  // longer texts are cut when encoded
inline constexpr std::size_t kMaxDimensions = 64;
inline constexpr std::size_t kMaxParts = 1 << 16;  // tensors of a grouped call

// Texts that are too long are cut, activities beyond kMaxActivities are left out. Everything else
// that Decode would refuse is a bug of the caller and terminates: a name or a shape out of bounds,
// a key of another set than its item's or batch's, a variant without ranks or content.
Bytes Encode(const Message& message);

// Decode leaves `*message` unspecified on error. Errors: kProtocol, naming the field and the byte's
// offset. Allocates in proportion to bytes.size(), whatever the counts in it promise: an element is
// made when those before it were read (at worst some 200 bytes of memory for each).
Status Decode(std::span<const std::byte> bytes, Message* message);

// A frame is what the medium carries: a message, and its digest as a fixed64. So bytes that arrive
// changed are an error, and never another message. The bounds and errors are those above.
Bytes EncodeFrame(const Message& message);
Status DecodeFrame(std::span<const std::byte> frame, Message* message);

}  // namespace sirtaki::core
