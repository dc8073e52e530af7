// The words that every folder uses: data types, kinds of collectives, reductions, time, sizes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sirtaki::core {

// Monotonic time. The pure classes never read a clock: time is an argument.
using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

enum class DType : std::uint8_t {
  kU8,
  kI8,
  kI16,
  kI32,
  kI64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kBool,
  kC64,  // pairs of float32: real, imaginary
  kC128,
  // Moved, never computed with.
  kF8E4M3FN,
  kF8E4M3FNUZ,
  kF8E5M2,
  kF8E5M2FNUZ,
  kF8E8M0FNU,
};
inline constexpr int kDTypeCount = 17;

std::size_t SizeOf(DType dtype);  // bytes of one element
inline std::int64_t BytesOf(DType dtype) { return static_cast<std::int64_t>(SizeOf(dtype)); }
std::string_view DTypeName(DType dtype);  // "uint8", "bfloat16", … LibTorch's words
bool IsFloating(DType dtype);             // float16, bfloat16, float32, float64
bool IsHalf(DType dtype);                 // float16, bfloat16
bool IsInteger(DType dtype);              // not bool
bool IsComplex(DType dtype);
// The type of a complex number's two parts; of another type itself.
DType PartType(DType dtype);

enum class OpKind : std::uint8_t {
  kAllReduce,
  kBroadcast,
  kAllGather,      // the first dimension may differ by rank
  kAllGatherInto,  // equal shapes
  kReduce,
  kGather,   // as kAllGather, to the root alone
  kScatter,  // the root's rows to all
  kAllToAll,
  kReduceScatter,
  kBarrier,
  kMakeArena,  // memory for buckets on a GPU, of all members: no tensors
  // Messages go between two ranks and are not negotiated.
  kSend,
  kReceive,
};
inline constexpr int kOpKindCount = 13;
std::string_view OpKindName(OpKind kind);  // "all-reduce", "broadcast", "all-gather", …
// Reduces is true of all-reduce, reduce and reduce-scatter.
constexpr bool Reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter;
}
// HasRoot is true of broadcast, reduce, gather and scatter.
constexpr bool HasRoot(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}
// The first dimension may differ by rank: it is not in the signature, and the lane exchanges it.
constexpr bool FirstDimensionVaries(OpKind kind) {
  return kind == OpKind::kAllGather || kind == OpKind::kGather || kind == OpKind::kScatter ||
         kind == OpKind::kAllToAll;
}

enum class ReduceOp : std::uint8_t {
  kSum,
  kAverage,
  kMin,
  kMax,
  kProduct,
  kBitAnd,
  kBitOr,
  kBitXor,
  kAdasum,
};
inline constexpr int kReduceOpCount = 9;
std::string_view ReduceOpName(ReduceOp op);  // "sum", "average", "bitwise and", …
// Whether a reduction is defined for a type at all.
bool IsDefined(ReduceOp op, DType dtype);

enum class DeviceKind : std::uint8_t { kHost, kCuda };
inline constexpr int kDeviceKindCount = 2;

// RoundUp gives the first multiple of `step` that is not below the number. Precondition: number >= 0.
constexpr std::int64_t RoundUp(std::int64_t number, std::int64_t step) {
  return (number + step - 1) / step * step;
}

// A process set's number; 0 is the world. Numbers are not reused within a session.
using SetNumber = std::uint32_t;
inline constexpr SetNumber kWorldSet = 0;

// A set's agreed abbreviation of a request; ascends within a set, is not reused, 0 is none.
using AgreedId = std::uint64_t;
inline constexpr AgreedId kNoId = 0;

}  // namespace sirtaki::core
