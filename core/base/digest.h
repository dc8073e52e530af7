// A 64-bit digest of memory, at the speed of memory, tells whether two ranks hold the same: xxHash's
// XXH3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace sirtaki::core {

// Equal bytes give equal digests on every machine of the same byte order; bytes that differ give
// the same one with a chance of 2^-64. No defence against somebody who wants a clash.
std::uint64_t Digest(const void* data, std::size_t bytes);

// A running digest is that of bytes that come in pieces, however they are cut.
class RunningDigest {
 public:
  RunningDigest();
  void Add(const void* data, std::size_t bytes);
  std::uint64_t Get() const;

 private:
  std::shared_ptr<void> state_;  // xxHash's
};

}  // namespace sirtaki::core
