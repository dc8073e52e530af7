#include "fusion/pack.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

namespace sirtaki::fusion {
namespace {

// Windows are cut at multiples of a cache line from the start of what they are cut from.
constexpr std::int64_t kLineBytes = 64;

const std::byte* At(const void* base, std::int64_t index, core::DType dtype) {
  return static_cast<const std::byte*>(base) + index * BytesOf(dtype);
}

std::byte* At(void* base, std::int64_t index, core::DType dtype) {
  return static_cast<std::byte*>(base) + index * BytesOf(dtype);
}

// `count` elements of `size` bytes, all like `element`.
void Fill(std::byte* to, const Identity& element, std::int64_t size, std::int64_t count) {
  const auto bytes = static_cast<std::size_t>(size * count);
  if (element.bytes == Identity{}.bytes) {
    std::memset(to, 0, bytes);
    return;
  }
  auto filled = std::min(static_cast<std::size_t>(size), bytes);
  std::memcpy(to, element.bytes.data(), filled);
  // Copies what is there, twice as much each time, up to what the first level of a cache holds.
  constexpr std::size_t kMost = 4096;
  while (filled < bytes) {
    const std::size_t more = std::min({filled, kMost, bytes - filled});
    std::memcpy(to + filled, to, more);
    filled += more;
  }
}

}  // namespace

FusedVector::FusedVector(core::DType dtype, core::DType moved, std::vector<Piece> pieces,
                         const Cutting& cutting, const std::optional<Identity>& identity)
    : dtype_(dtype), moved_(moved), identity_(identity), pieces_(std::move(pieces)) {
  const std::int64_t element = BytesOf(moved_);
  const auto is_direct = [&](const Piece& piece) {
    return dtype_ == moved_ && piece.count > 0 && piece.count >= cutting.direct_bytes / element;
  };
  const auto direct = std::stable_partition(pieces_.begin(), pieces_.end(),
                                            [&](const Piece& piece) { return !is_direct(piece); });

  starts_.reserve(pieces_.size() + 1);
  starts_.push_back(0);
  for (const Piece& piece : pieces_) starts_.push_back(starts_.back() + piece.count);

  const std::int64_t line = std::max<std::int64_t>(1, kLineBytes / element);
  const std::int64_t chunk = std::max(cutting.chunk_bytes / element / line, std::int64_t{1}) * line;
  auto i = static_cast<std::size_t>(direct - pieces_.begin());
  Cut(0, starts_[i], chunk, /*direct=*/false);
  for (; i < pieces_.size(); ++i) Cut(starts_[i], starts_[i + 1], chunk, /*direct=*/true);
}

void FusedVector::Cut(std::int64_t begin, std::int64_t end, std::int64_t chunk, bool direct) {
  if (begin == end) return;
  const std::int64_t line = std::max<std::int64_t>(1, kLineBytes / BytesOf(moved_));
  const std::int64_t number = (end - begin - 1) / chunk + 1;
  const std::int64_t even = (end - begin + number - 1) / number;
  const std::int64_t step = core::RoundUp(even, line);  // at most chunk, a multiple of line
  for (; begin < end; begin += step) {
    const std::int64_t count = std::min(step, end - begin);
    windows_.push_back({.begin = begin, .count = count, .direct = direct});
    staging_bytes_ = std::max(staging_bytes_, count * BytesOf(moved_));
  }
}

template <typename Function>
void FusedVector::ForEachPart(const Window& window, Function function) const {
  const std::int64_t end = window.begin + window.count;
  // The piece that holds the first element: the last one that starts at or before it.
  auto i = static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), window.begin) -
                                    starts_.begin() - 1);
  for (; i < pieces_.size() && starts_[i] < end; ++i) {
    const std::int64_t from = std::max(window.begin, starts_[i]);
    const std::int64_t to = std::min(end, starts_[i + 1]);
    if (from == to) continue;
    function(Part{&pieces_[i], from - starts_[i], from - window.begin, to - from});
  }
}

void* FusedVector::Memory(const Window& window, void* staging) const {
  void* memory = staging;
  if (window.direct) {
    ForEachPart(window, [&](const Part& part) {
      if (part.piece->output != nullptr) memory = At(part.piece->output, part.offset, dtype_);
    });
  }
  return memory;
}

void* FusedVector::Load(const Window& window, void* staging, Scale scale) const {
  void* const memory = Memory(window, staging);
  // A direct tensor in place is its own source and target, and only a scale leaves work to do.
  LoadInto(window, memory, scale);
  return memory;
}

void FusedVector::Store(const Window& window, void* staging, Scale scale) const {
  StoreFrom(window, Memory(window, staging), scale);
}

const void* FusedVector::Source(const Window& window) const {
  const void* source = nullptr;
  if (window.direct) {
    ForEachPart(window, [&](const Part& part) {
      if (part.piece->input != nullptr) source = At(part.piece->input, part.offset, dtype_);
    });
  }
  return source;
}

void FusedVector::LoadInto(const Window& window, void* memory, Scale scale) const {
  ForEachPart(window, [&](const Part& part) {
    std::byte* const to = At(memory, part.begin, moved_);
    if (part.piece->input == nullptr) {
      if (identity_) Fill(to, *identity_, BytesOf(moved_), part.count);
    } else {
      const std::byte* const from = At(part.piece->input, part.offset, dtype_);
      Convert(dtype_, from, moved_, to, part.count, scale);
    }
  });
}

void FusedVector::StoreFrom(const Window& window, const void* memory, Scale scale,
                            std::int64_t copy) const {
  ForEachPart(window, [&](const Part& part) {
    if (part.piece->output == nullptr) return;
    const std::byte* const from = At(memory, part.begin, moved_);
    std::byte* const to = At(part.piece->output, copy * part.piece->count + part.offset, dtype_);
    Convert(moved_, from, dtype_, to, part.count, scale);
  });
}

}  // namespace sirtaki::fusion
