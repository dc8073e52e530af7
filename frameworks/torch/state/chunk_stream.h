// A long row of bytes from one rank to all others of a set, through two buffers of a chunk each:
// while one is filled or emptied the other travels.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "frameworks/torch/calls/pending_tensor.h"
#include "frameworks/torch/session/session_set.h"

namespace sirtaki::detail {

// One thread. All ranks make it for the same number of bytes and call Finish; whatever goes wrong
// with a chunk, the others are moved all the same, so that no rank is left waiting, and Finish
// throws the first error.
//
// The buffers are not the caller's memory because after a fault a data thread may still use them.
class ChunkStream {
 public:
  static constexpr std::uint64_t kChunkBytes = std::uint64_t{16} << 20;

  // Allocates the buffers; if it cannot, Finish throws why on all ranks. `name` empty: matched by call
  // order.
  ChunkStream(std::uint64_t bytes, int root_rank, std::string name, SessionSet set);

  // Sends the next bytes, which are copied; the root calls it.
  void Send(const void* from, std::uint64_t bytes) noexcept;
  // Receives the next bytes; the others call it.
  void Receive(void* to, std::uint64_t bytes) noexcept;
  // Moves what is missing, its values undefined, and waits.
  void Finish();

 private:
  struct Buffer {
    at::Tensor tensor;
    std::shared_ptr<PendingTensor> pending;
  };

  std::uint64_t BytesOf(std::uint64_t chunk) const;
  void Submit(std::uint64_t chunk) noexcept;
  void Wait(Buffer& buffer) noexcept;

  const std::uint64_t bytes_;
  const int root_rank_;
  const std::string name_;
  const SessionSet set_;
  std::string no_memory_;          // why there are no buffers
  std::array<Buffer, 2> buffers_;  // chunk n uses n % 2
  std::uint64_t position_ = 0;
  std::uint64_t submitted_ = 0;  // chunks
  std::exception_ptr first_error_;
};

}  // namespace sirtaki::detail
