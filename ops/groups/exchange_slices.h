// Runs that move slices share this: the slices of one Exchange, and how much of them is staged.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/base/backend.h"

namespace sirtaki::ops {

// Bytes of a window of each of several members' parts that are staged side by side: together a
// chunk, but with many members no less than is worth a message.
std::int64_t WindowBytes(std::int64_t chunk_bytes, std::int64_t members);

// These slices are given to and taken from the others in one Exchange. Memory is kept for the
// next.
class Slices {
 public:
  void Clear();
  // Nothing is noted where there is not a byte.
  void Send(std::int64_t member, const void* memory, std::int64_t bytes);
  void Receive(std::int64_t member, void* memory, std::int64_t bytes);
  // All members give each other parts of `bytes` bytes, and nothing else: part j of member i's
  // input becomes part i of member j's output. What is this member's own, it copies at once. The
  // memories are disjoint.
  void GiveParts(const void* input, void* output, std::int64_t bytes, std::int64_t self,
                 std::int64_t members);

  const std::vector<OutgoingSlice>& outgoing() const { return outgoing_; }
  const std::vector<IncomingSlice>& incoming() const { return incoming_; }
  std::unique_ptr<Completion> Exchange(Backend& backend, Channel channel) const {
    return backend.Exchange(channel, outgoing_, incoming_);
  }

 private:
  std::vector<OutgoingSlice> outgoing_;
  std::vector<IncomingSlice> incoming_;
};

}  // namespace sirtaki::ops
