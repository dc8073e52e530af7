#include "ops/kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/check.h"

namespace sirtaki::ops {
namespace {

template <typename T>
void Add(void* accumulator, const void* addend, std::int64_t count) {
  T* __restrict to = static_cast<T*>(accumulator);
  const T* __restrict from = static_cast<const T*>(addend);
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(to[i] + from[i]);
}

}  // namespace

bool HasReduction(core::ReduceOp op, core::DType dtype) {
  return op == core::ReduceOp::kSum && core::IsDefined(op, dtype) && !core::IsHalf(dtype) &&
         !core::IsComplex(dtype);
}

void ReduceInto(core::ReduceOp op, core::DType dtype, void* accumulator, const void* addend,
                std::int64_t count) {
  SIRTAKI_CHECK(HasReduction(op, dtype), "this type has no such reduction of its own");
  // Signed integers are added as unsigned ones: the same bits, and wrapping is defined.
  switch (dtype) {
    case core::DType::kU8:
    case core::DType::kI8:
      return Add<std::uint8_t>(accumulator, addend, count);
    case core::DType::kI16:
      return Add<std::uint16_t>(accumulator, addend, count);
    case core::DType::kI32:
      return Add<std::uint32_t>(accumulator, addend, count);
    case core::DType::kI64:
      return Add<std::uint64_t>(accumulator, addend, count);
    case core::DType::kF32:
      return Add<float>(accumulator, addend, count);
    case core::DType::kF64:
      return Add<double>(accumulator, addend, count);
    default:
      break;
  }
}

void FillIdentity(core::ReduceOp /*op*/, core::DType dtype, void* memory, std::int64_t count) {
  std::memset(memory, 0, static_cast<std::size_t>(count) * core::SizeOf(dtype));
}

void ReduceParts(core::ReduceOp op, core::DType dtype, void* parts, std::int64_t members,
                 std::int64_t count, fusion::Scale before, fusion::Scale after) {
  constexpr core::DType kWide = core::DType::kF32;
  constexpr std::int64_t kBlock = 2048;  // both blocks stay in the cache's first level
  float sum[kBlock];
  float addend[kBlock];
  const auto element = static_cast<std::int64_t>(core::SizeOf(dtype));
  auto* const bytes = static_cast<std::byte*>(parts);
  for (std::int64_t i = 0; i < count; i += kBlock) {
    const std::int64_t n = std::min(kBlock, count - i);
    fusion::Convert(dtype, bytes + i * element, kWide, sum, n, before);
    for (std::int64_t m = 1; m < members; ++m) {
      fusion::Convert(dtype, bytes + (m * count + i) * element, kWide, addend, n, before);
      ReduceInto(op, kWide, sum, addend, n);
    }
    fusion::Convert(kWide, sum, dtype, bytes + i * element, n, after);
  }
}

}  // namespace sirtaki::ops
