// What the NCCL of FakeGpus computes, and the way that the real one would take.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "tests/support/fake_gpus_state.h"
#include "tests/support/half_reference.h"

namespace sirtaki::tests {

using ops::nccl::DataType;
using ops::nccl::RedOp;

// sym_kernels.cc:269, device.h:543 (ncclNvlsSupported), register/coll_reg.cc:48 and 184 of
// v2.28.9-1.
const char* PathOfAllReduce(const FakeAllReduce& call) {
  const bool is_half = call.type == DataType::kFloat16 || call.type == DataType::kBfloat16;
  const bool is_float = is_half || call.type == DataType::kFloat32;
  const bool is_sum =
      call.op == RedOp::kSum;  // an average of floats is a PreMulSum, of others a PostDiv
  if (call.in_window && call.hosts == 1 && is_sum && is_float) return "symmetric";
  const bool is_small = call.type == DataType::kInt8 || call.type == DataType::kUint8;
  const bool is_wide_float = call.type == DataType::kFloat32 || call.type == DataType::kFloat64;
  const bool is_least_or_most = call.op == RedOp::kMin || call.op == RedOp::kMax;
  if (call.nvls && !is_small && (is_sum || (is_least_or_most && !is_wide_float))) {
    return call.registered ? "nvls" : "nvls, copied";
  }
  return call.registered && !call.in_place ? "ring" : "ring, copied";
}

std::size_t FakeSizeOf(DataType type) {
  switch (type) {
    case DataType::kInt8:
    case DataType::kUint8:
      return 1;
    case DataType::kFloat16:
    case DataType::kBfloat16:
      return 2;
    case DataType::kInt32:
    case DataType::kFloat32:
      return 4;
    case DataType::kInt64:
    case DataType::kFloat64:
      return 8;
  }
  std::abort();
}

namespace {

template <typename T>
T Combine(RedOp op, T a, T b) {
  if (op == RedOp::kMin) return std::min(a, b);
  if (op == RedOp::kMax) return std::max(a, b);
  if constexpr (std::is_floating_point_v<T>) {
    return op == RedOp::kProd ? a * b : a + b;
  } else {
    using Unsigned = std::make_unsigned_t<T>;
    const auto x = static_cast<std::uint64_t>(static_cast<Unsigned>(a));
    const auto y = static_cast<std::uint64_t>(static_cast<Unsigned>(b));
    return static_cast<T>(op == RedOp::kProd ? x * y : x + y);
  }
}

// `round`: to the type of the tensors, which each step ends in. For averages NCCL multiplies what
// each rank gives by 1/n, rounded to that type, before it adds; of integers it divides the sum.
template <typename T, typename Read, typename Round, typename Write>
void ReduceAs(RedOp op, const std::vector<FakePart>& parts, std::size_t count,
              const std::vector<void*>& outputs, Read read, Round round, Write write) {
  const auto ranks = static_cast<T>(parts.size());
  const bool scales = op == RedOp::kAvg && std::is_floating_point_v<T>;
  const T share = scales ? round(1 / ranks) : 1;
  const auto given = [&](const FakePart& part, std::size_t i) {
    const T value = read(part.input, i);
    return scales ? round(value * share) : value;
  };
  for (std::size_t i = 0; i < count; ++i) {
    T value = given(parts.front(), i);
    for (std::size_t p = 1; p < parts.size(); ++p) {
      value = round(Combine(op, value, given(parts[p], i)));
    }
    if (op == RedOp::kAvg && !scales) value = static_cast<T>(value / ranks);
    for (void* output : outputs) write(output, i, value);
  }
}

template <typename T>
void ReducePlain(RedOp op, const std::vector<FakePart>& parts, std::size_t count,
                 const std::vector<void*>& outputs) {
  ReduceAs<T>(
      op, parts, count, outputs,
      [](const void* from, std::size_t i) { return static_cast<const T*>(from)[i]; },
      [](T value) { return value; },
      [](void* to, std::size_t i, T value) { static_cast<T*>(to)[i] = value; });
}

void ReduceHalf(const SmallFloat& format, RedOp op, const std::vector<FakePart>& parts,
                std::size_t count, const std::vector<void*>& outputs) {
  ReduceAs<float>(
      op, parts, count, outputs,
      [&](const void* from, std::size_t i) {
        return static_cast<float>(format.Decode(static_cast<const std::uint16_t*>(from)[i]));
      },
      [&](float value) {
        return static_cast<float>(format.Decode(format.Encode(static_cast<double>(value))));
      },
      [&](void* to, std::size_t i, float value) {
        static_cast<std::uint16_t*>(to)[i] = format.Encode(static_cast<double>(value));
      });
}

}  // namespace

void FakeReduce(RedOp op, DataType type, const std::vector<FakePart>& parts, std::size_t count,
                const std::vector<void*>& outputs) {
  switch (type) {
    case DataType::kInt8:
      return ReducePlain<std::int8_t>(op, parts, count, outputs);
    case DataType::kUint8:
      return ReducePlain<std::uint8_t>(op, parts, count, outputs);
    case DataType::kInt32:
      return ReducePlain<std::int32_t>(op, parts, count, outputs);
    case DataType::kInt64:
      return ReducePlain<std::int64_t>(op, parts, count, outputs);
    case DataType::kFloat32:
      return ReducePlain<float>(op, parts, count, outputs);
    case DataType::kFloat64:
      return ReducePlain<double>(op, parts, count, outputs);
    case DataType::kFloat16:
      return ReduceHalf(kFloat16, op, parts, count, outputs);
    case DataType::kBfloat16:
      return ReduceHalf(kBFloat16, op, parts, count, outputs);
  }
}

}  // namespace sirtaki::tests
