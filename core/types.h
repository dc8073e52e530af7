// The words that every folder uses: data types, kinds of collectives, reductions, time.
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

enum class DType : std::uint8_t { kU8, kI8, kI16, kI32, kI64, kF16, kBF16, kF32, kF64, kBool };
inline constexpr int kDTypeCount = 10;

std::size_t SizeOf(DType dtype);          // bytes of one element
std::string_view DTypeName(DType dtype);  // "uint8", "bfloat16", … LibTorch's words
bool IsFloating(DType dtype);

enum class OpKind : std::uint8_t { kAllReduce, kBroadcast, kAllGather };
inline constexpr int kOpKindCount = 3;
std::string_view OpKindName(OpKind kind);  // "all-reduce", "broadcast", "all-gather"

enum class ReduceOp : std::uint8_t { kSum, kAverage };
inline constexpr int kReduceOpCount = 2;
std::string_view ReduceOpName(ReduceOp op);  // "sum", "average"

enum class DeviceKind : std::uint8_t { kHost, kCuda };
inline constexpr int kDeviceKindCount = 2;

// A process set's number; 0 is the world. Numbers are not reused within a session.
using SetNumber = std::uint32_t;
inline constexpr SetNumber kWorldSet = 0;

// A set's agreed abbreviation of a request; ascends within a set, is not reused, 0 is none.
using AgreedId = std::uint64_t;
inline constexpr AgreedId kNoId = 0;

}  // namespace sirtaki::core
