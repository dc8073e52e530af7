// A 64-bit digest of memory, at the speed of memory: for telling whether two ranks hold the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sirtaki::core {

// Equal bytes give equal digests on every machine of the same byte order. Two buffers of one length
// that differ within a single aligned group of 8 bytes always have different digests; others that
// differ, with a chance of 2^-64 that they do not. No defence against somebody who wants a clash.
std::uint64_t Digest(const void* data, std::size_t bytes);

}  // namespace sirtaki::core
