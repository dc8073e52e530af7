// A group of tensors as one vector, moved window by window: each window is loaded (scaled, widened)
// into memory that an operation works on, and stored (scaled, rounded) afterwards, while it is in
// the cache. Scaling is part of the copy, never a pass of its own.
//
// Windows depend on what all ranks agree on only (element counts, types, limits), never on a rank's
// own pointers, so every rank cuts the same ones. Small tensors come first in the vector, packed
// together; tensors of at least `direct_bytes` follow, each cut by itself, and move in their own
// output memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "core/base/types.h"
#include "core/engine/work.h"
#include "fusion/convert.h"

namespace sirtaki::fusion {

// One tensor of the group as this rank sees it.
struct Piece {
  const void* input = nullptr;  // null: gives the identity, or nothing
  void* output = nullptr;  // null: the result is dropped. Equal to `input`, or disjoint from it
  std::int64_t count = 0;  // elements, the same on all ranks
  core::KeptPart* kept = nullptr;  // null: the whole result is needed
};

// An operation moves a window.
struct Window {
  std::int64_t begin = 0;  // elements of the vector
  std::int64_t count = 0;
  bool direct = false;  // lies in one large tensor
};

struct Cutting {
  std::int64_t chunk_bytes = std::int64_t{1} << 20;  // of a window, in the type that is moved
  // Tensors of at least this size are moved where they lie, if their type is not widened.
  std::int64_t direct_bytes = std::numeric_limits<std::int64_t>::max();
};

// The bytes of one element, of the type that is moved: what a piece without input contributes,
// unscaled. Zero unless said otherwise.
struct Identity {
  alignas(8) std::array<std::byte, 16> bytes{};
};

// The vector is not thread-safe; it refers to the tensors' memory and owns none.
class FusedVector {
 public:
  // `moved`: the type in which elements move: `dtype` itself, or one that Convert takes. Without an
  // `identity` a piece that has no input leaves its place as it is.
  FusedVector(core::DType dtype, core::DType moved, std::vector<Piece> pieces,
              const Cutting& cutting, const std::optional<Identity>& identity = Identity());

  core::DType moved() const { return moved_; }
  std::int64_t count() const { return starts_.back(); }
  // The windows are in order, and together they are the vector. None if it is empty.
  const std::vector<Window>& windows() const { return windows_; }
  // The largest window needs this much, on any rank.
  std::int64_t staging_bytes() const { return staging_bytes_; }

  // The memory in which the window moves: its tensor's output if it is direct and kept, else
  // `staging`.
  void* Memory(const Window& window, void* staging) const;

  // Brings the window's elements into Memory(window, staging) and returns that.
  void* Load(const Window& window, void* staging, Scale scale = {}) const;

  // After the operation: elements go from Memory(window, staging) to the outputs.
  void Store(const Window& window, void* staging, Scale scale = {}) const;

  // Where the window's elements lie in memory that holds them as they move: in the input of a
  // direct one. Null: they have to be loaded.
  const void* Source(const Window& window) const;
  // LoadInto and StoreFrom are Load and Store with memory that is in no output. `copy`: of outputs
  // that hold several vectors of `count` elements, one after the other, the one that is stored.
  void LoadInto(const Window& window, void* memory, Scale scale = {}) const;
  void StoreFrom(const Window& window, const void* memory, Scale scale = {},
                 std::int64_t copy = 0) const;

 private:
  struct Part {  // of a piece, in a window
    const Piece* piece;
    std::int64_t offset;  // in the piece
    std::int64_t begin;   // in the window
    std::int64_t count;
  };
  template <typename Function>
  void ForEachPart(const Window& window, Function function) const;
  // [begin, end) as windows of nearly equal size, none above `chunk` elements.
  void Cut(std::int64_t begin, std::int64_t end, std::int64_t chunk, bool direct);

  core::DType dtype_;
  core::DType moved_;
  std::optional<Identity> identity_;
  std::vector<Piece> pieces_;         // small ones first
  std::vector<std::int64_t> starts_;  // of each piece in the vector; the last is the end
  std::vector<Window> windows_;
  std::int64_t staging_bytes_ = 0;
};

}  // namespace sirtaki::fusion
