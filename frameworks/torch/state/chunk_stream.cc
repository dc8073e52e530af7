#include "frameworks/torch/state/chunk_stream.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "frameworks/torch/calls/blocking.h"
#include "frameworks/torch/tensors/tensor_bridge.h"

namespace sirtaki::detail {

ChunkStream::ChunkStream(std::uint64_t bytes, int root_rank, std::string name, SessionSet set)
    : bytes_(bytes), root_rank_(root_rank), name_(std::move(name)), set_(std::move(set)) {
  for (std::uint64_t chunk = 0; chunk < buffers_.size(); ++chunk) {
    try {
      const auto size = static_cast<std::int64_t>(BytesOf(chunk));
      buffers_[chunk].tensor = at::empty({size}, at::kByte);
    } catch (const std::exception& failure) {
      no_memory_ = WhyNoMemory(failure);
    }
  }
}

std::uint64_t ChunkStream::BytesOf(std::uint64_t chunk) const {
  const std::uint64_t before = std::min(bytes_, chunk * kChunkBytes);
  return std::min(kChunkBytes, bytes_ - before);
}

void ChunkStream::Submit(std::uint64_t chunk) noexcept {
  try {
    Buffer& buffer = buffers_[chunk % buffers_.size()];
    // Two may be in flight.
    TensorCall call = OwnCall(core::OpKind::kBroadcast, {},
                              PartName(name_, chunk % 2 == 0 ? "even chunk" : "odd chunk"), set_);
    call.invalid = no_memory_;
    if (no_memory_.empty()) {
      call.tensor = buffer.tensor.narrow(0, 0, static_cast<std::int64_t>(BytesOf(chunk)));
    }
    call.will_wait = false;
    call.in_place = true;
    call.root = root_rank_;
    buffer.pending = PendingTensor::Start(std::move(call), set_.session);
  } catch (...) {
    if (!first_error_) first_error_ = std::current_exception();
  }
}

void ChunkStream::Wait(Buffer& buffer) noexcept {
  const auto pending = std::move(buffer.pending);
  buffer.pending = nullptr;
  if (!pending) return;
  try {
    pending->Synchronize();
  } catch (...) {
    if (!first_error_) first_error_ = std::current_exception();
  }
}

void ChunkStream::Send(const void* from, std::uint64_t bytes) noexcept {
  const auto* source = static_cast<const char*>(from);
  while (bytes > 0) {
    const std::uint64_t chunk = position_ / kChunkBytes;
    const std::uint64_t offset = position_ % kChunkBytes;
    Buffer& buffer = buffers_[chunk % buffers_.size()];
    if (offset == 0) Wait(buffer);
    const std::uint64_t part = std::min(bytes, BytesOf(chunk) - offset);
    if (source && no_memory_.empty()) {
      std::memcpy(static_cast<char*>(buffer.tensor.mutable_data_ptr()) + offset, source, part);
      source += part;
    }
    position_ += part;
    bytes -= part;
    if (offset + part == BytesOf(chunk)) Submit(chunk);
  }
}

void ChunkStream::Receive(void* to, std::uint64_t bytes) noexcept {
  auto* target = static_cast<char*>(to);
  while (bytes > 0) {
    const std::uint64_t chunk = position_ / kChunkBytes;
    const std::uint64_t offset = position_ % kChunkBytes;
    Buffer& buffer = buffers_[chunk % buffers_.size()];
    if (offset == 0) {
      // The one after it is on its way while this one is emptied.
      for (; submitted_ <= chunk + 1 && BytesOf(submitted_) > 0; ++submitted_) Submit(submitted_);
      Wait(buffer);
    }
    const std::uint64_t part = std::min(bytes, BytesOf(chunk) - offset);
    if (target && no_memory_.empty()) {
      std::memcpy(target, static_cast<const char*>(buffer.tensor.const_data_ptr()) + offset, part);
      target += part;
    }
    position_ += part;
    bytes -= part;
  }
}

void ChunkStream::Finish() {
  if (set_.rank() == root_rank_) {
    Send(nullptr, bytes_ - position_);
  } else {
    Receive(nullptr, bytes_ - position_);
  }
  for (Buffer& buffer : buffers_) Wait(buffer);
  if (first_error_) std::rethrow_exception(first_error_);
}

}  // namespace sirtaki::detail
