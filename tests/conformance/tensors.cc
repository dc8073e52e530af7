#include "tests/conformance/tensors.h"

#include <ATen/Functions.h>

#include <cmath>
#include <cstring>
#include <sstream>

namespace sirtaki::tests::conformance {
namespace {

using core::DType;

// What lies between the elements of a strided view; a bool may hold it, too.
constexpr unsigned char kGap = 1;

std::byte* BytesOf(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

// Calls `visit(index, offset in bytes)` for each element, in row-major order.
template <typename Visit>
void ForEach(const at::Tensor& tensor, Visit visit) {
  const std::int64_t rows = tensor.size(0);
  const std::int64_t columns = tensor.dim() > 1 ? tensor.size(1) : 1;
  const std::int64_t row_step = tensor.stride(0);
  const std::int64_t column_step = tensor.dim() > 1 ? tensor.stride(1) : 0;
  const auto element = static_cast<std::int64_t>(tensor.element_size());
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < columns; ++j) {
      visit(i * columns + j, (i * row_step + j * column_step) * element);
    }
  }
}

void Write(const Array& array, const at::Tensor& tensor) {
  const auto element = static_cast<std::int64_t>(core::SizeOf(array.dtype));
  std::byte* const bytes = BytesOf(tensor);
  if (tensor.is_contiguous()) {
    if (!array.bytes.empty()) std::memcpy(bytes, array.bytes.data(), array.bytes.size());
    return;
  }
  ForEach(tensor, [&](std::int64_t index, std::int64_t offset) {
    std::memcpy(bytes + offset, array.bytes.data() + index * element,
                static_cast<std::size_t>(element));
  });
}

Array Read(const at::Tensor& tensor, DType dtype) {
  Array array = MakeArray(dtype, tensor.sizes().vec());
  const auto element = static_cast<std::int64_t>(core::SizeOf(dtype));
  const std::byte* const bytes = BytesOf(tensor);
  if (tensor.is_contiguous()) {
    if (!array.bytes.empty()) std::memcpy(array.bytes.data(), bytes, array.bytes.size());
    return array;
  }
  ForEach(tensor, [&](std::int64_t index, std::int64_t offset) {
    std::memcpy(array.bytes.data() + index * element, bytes + offset,
                static_cast<std::size_t>(element));
  });
  return array;
}

bool SameElement(const Array& got, const Array& expected, std::int64_t index, double tolerance,
                 bool any_nan) {
  const std::size_t element = core::SizeOf(core::PartType(got.dtype));
  const std::size_t at = static_cast<std::size_t>(index) * element;
  if (tolerance == 0 &&
      std::memcmp(got.bytes.data() + at, expected.bytes.data() + at, element) == 0) {
    return true;
  }
  if (tolerance == 0 && !any_nan) return false;
  const double x = LoadFloat(got, index);
  const double y = LoadFloat(expected, index);
  if (tolerance == 0) return std::isnan(x) && std::isnan(y);
  return std::fabs(x - y) <= tolerance * std::fmax(1.0, std::fabs(y));
}

std::string TextOf(const Array& array, std::int64_t index) {
  std::ostringstream text;
  if (core::IsFloating(core::PartType(array.dtype))) {
    text << LoadFloat(array, index);
  } else if (core::IsInteger(array.dtype) || array.dtype == DType::kBool) {
    text << LoadInteger(array, index);
  }
  const std::size_t element = core::SizeOf(core::PartType(array.dtype));
  text << " (bytes" << std::hex;
  for (std::size_t i = 0; i < element; ++i) {
    const std::byte byte = array.bytes[static_cast<std::size_t>(index) * element + i];
    text << " " << std::to_integer<int>(byte);
  }
  text << ")";
  return text.str();
}

}  // namespace

at::ScalarType TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kU8:
      return at::kByte;
    case DType::kI8:
      return at::kChar;
    case DType::kI16:
      return at::kShort;
    case DType::kI32:
      return at::kInt;
    case DType::kI64:
      return at::kLong;
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kF32:
      return at::kFloat;
    case DType::kF64:
      return at::kDouble;
    case DType::kBool:
      return at::kBool;
    case DType::kC64:
      return at::kComplexFloat;
    case DType::kC128:
      return at::kComplexDouble;
    case DType::kF8E4M3FN:
      return at::kFloat8_e4m3fn;
    case DType::kF8E4M3FNUZ:
      return at::kFloat8_e4m3fnuz;
    case DType::kF8E5M2:
      return at::kFloat8_e5m2;
    case DType::kF8E5M2FNUZ:
      return at::kFloat8_e5m2fnuz;
    case DType::kF8E8M0FNU:
      return at::kFloat8_e8m0fnu;
  }
  return at::ScalarType::Undefined;
}

LaidOut MakeTensor(const Array& array, ShapeClass shape) {
  const at::TensorOptions options(TypeOf(array.dtype));
  LaidOut made;
  switch (shape) {
    case ShapeClass::kTransposed:
      made.tensor = at::empty({array.shape[1], array.shape[0]}, options).t();
      break;
    case ShapeClass::kStrided:
      made.memory = at::empty({array.shape[0], 2 * array.shape[1] + 1}, options);
      if (made.memory.nbytes() > 0) std::memset(made.memory.data_ptr(), kGap, made.memory.nbytes());
      made.tensor = made.memory.slice(1, 1, c10::nullopt, 2);
      break;
    case ShapeClass::kExpanded:
      made.tensor = at::empty({1, array.shape[1]}, options).expand(array.shape);
      break;
    default:
      made.tensor = at::empty(array.shape, options);
      break;
  }
  Write(array, made.tensor);
  return made;
}

std::string WhyNotEqual(const at::Tensor& tensor, const Array& expected, double tolerance,
                        bool any_nan) {
  if (!tensor.defined()) return "the tensor is undefined";
  std::ostringstream why;
  if (tensor.scalar_type() != TypeOf(expected.dtype)) {
    why << "its type is " << tensor.scalar_type() << ", not " << TypeOf(expected.dtype);
    return why.str();
  }
  if (tensor.sizes() != at::IntArrayRef(expected.shape)) {
    why << "its shape is " << tensor.sizes() << ", not " << at::IntArrayRef(expected.shape);
    return why.str();
  }
  const Array got = Read(tensor, expected.dtype);
  if (tolerance == 0 && got.bytes == expected.bytes) return {};
  const std::int64_t count = got.Elements() * (core::IsComplex(got.dtype) ? 2 : 1);
  for (std::int64_t i = 0; i < count; ++i) {
    if (SameElement(got, expected, i, tolerance, any_nan)) continue;
    why << "element " << i << " of " << count << " is " << TextOf(got, i) << ", not "
        << TextOf(expected, i);
    return why.str();
  }
  return {};
}

std::string WhyTouchedOutside(const LaidOut& laid_out, ShapeClass shape) {
  if (shape != ShapeClass::kStrided) return {};
  const std::int64_t rows = laid_out.memory.size(0);
  const std::int64_t columns = laid_out.memory.size(1);
  const auto element = static_cast<std::int64_t>(laid_out.memory.element_size());
  const std::byte* const bytes = BytesOf(laid_out.memory);
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    if (i % columns % 2 != 0) continue;  // the view's own
    for (std::int64_t b = 0; b < element; ++b) {
      if (bytes[i * element + b] != std::byte{kGap}) {
        return "element " + std::to_string(i) + " of the memory around the view has changed";
      }
    }
  }
  return {};
}

}  // namespace sirtaki::tests::conformance
