#include "ops/kernels.h"

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

bool HasSum(core::DType dtype) {
  return dtype != core::DType::kF16 && dtype != core::DType::kBF16 && dtype != core::DType::kBool;
}

void AddInto(core::DType dtype, void* accumulator, const void* addend, std::int64_t count) {
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
    case core::DType::kF16:
    case core::DType::kBF16:
    case core::DType::kBool:
      break;
  }
  core::CheckFailed(__FILE__, __LINE__, "HasSum(dtype)", "this type has no sum of its own");
}

}  // namespace sirtaki::ops
