#include "frameworks/torch/tensors/tensor_bridge.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "core/base/text.h"
#include "core/protocol/wire.h"

namespace sirtaki::detail {
namespace {

constexpr auto kMostDimensions = static_cast<std::int64_t>(core::kMaxDimensions);

// Types are found by name: older versions of LibTorch have some of them only.
std::optional<core::DType> Float8Of(at::ScalarType type) {
  static constexpr std::array<std::pair<std::string_view, core::DType>, 5> kTypes = {{
      {"Float8_e4m3fn", core::DType::kF8E4M3FN},
      {"Float8_e4m3fnuz", core::DType::kF8E4M3FNUZ},
      {"Float8_e5m2", core::DType::kF8E5M2},
      {"Float8_e5m2fnuz", core::DType::kF8E5M2FNUZ},
      {"Float8_e8m0fnu", core::DType::kF8E8M0FNU},
  }};
  const std::string_view name = c10::toString(type);
  for (const auto& [known, dtype] : kTypes) {
    if (name == known) return dtype;
  }
  return std::nullopt;
}

// No message could carry more of a shape that WhyNotMovable rejects.
at::IntArrayRef ShapeOf(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_nested()) return {};
  return tensor.sizes().slice(0, static_cast<std::size_t>(std::min(tensor.dim(), kMostDimensions)));
}

}  // namespace

std::optional<core::DType> DTypeOf(at::ScalarType type) {
  using core::DType;
  static constexpr std::pair<at::ScalarType, DType> kTypes[] = {
      {at::kFloat, DType::kF32},        {at::kHalf, DType::kF16},
      {at::kBFloat16, DType::kBF16},    {at::kDouble, DType::kF64},
      {at::kByte, DType::kU8},          {at::kChar, DType::kI8},
      {at::kShort, DType::kI16},        {at::kInt, DType::kI32},
      {at::kLong, DType::kI64},         {at::kBool, DType::kBool},
      {at::kComplexFloat, DType::kC64}, {at::kComplexDouble, DType::kC128}};
  for (const auto& [known, dtype] : kTypes) {
    if (type == known) return dtype;
  }
  return Float8Of(type);
}

std::string WhyNotMovable(const at::Tensor& tensor) {
  if (!tensor.defined()) return "the tensor is undefined";
  if (tensor.is_nested()) return "the tensor is nested; only dense tensors are supported";
  // Texts are made where something is wrong only: a stream costs more than all that is looked at.
  if (tensor.layout() != at::kStrided) {
    return c10::str("the tensor has layout ", tensor.layout(),
                    "; only dense tensors are supported");
  }
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    return c10::str("the tensor is on ", tensor.device(),
                    "; only the CPU and CUDA's GPUs are supported");
  }
  if (!DTypeOf(tensor.scalar_type())) {
    return c10::str(
        "the tensor has type ", c10::toString(tensor.scalar_type()),
        "; supported are uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64, "
        "complex64, complex128, bool and, for moving, float8 types");
  }
  if (tensor.dim() > kMostDimensions) {
    return c10::str("the tensor has ", tensor.dim(), " dimensions; at most ", kMostDimensions,
                    " are supported");
  }
  return {};
}

core::Signature Describe(const at::Tensor& tensor) {
  core::Signature signature;
  if (!tensor.defined()) return signature;
  signature.dtype = DTypeOf(tensor.scalar_type()).value_or(signature.dtype);
  if (tensor.device().is_cuda()) signature.device = core::DeviceKind::kCuda;
  const at::IntArrayRef shape = ShapeOf(tensor);
  signature.shape.assign(shape.begin(), shape.end());
  return signature;
}

bool IsDescribedBy(const core::Signature& signature, const at::Tensor& tensor) {
  static const core::DType of_others = core::Signature().dtype;
  return signature.dtype == DTypeOf(tensor.scalar_type()).value_or(of_others) &&
         (signature.device == core::DeviceKind::kCuda) == tensor.device().is_cuda() &&
         ShapeOf(tensor) == at::IntArrayRef(signature.shape);
}

bool LiesFlat(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

bool LiesWith(const at::Tensor& dense, at::IntArrayRef strides) {
  if (dense.is_conj() || dense.is_neg()) return false;
  if (dense.numel() == 0) return true;
  for (std::int64_t d = 0; d < dense.dim(); ++d) {
    if (dense.size(d) != 1 && dense.stride(d) != strides[static_cast<std::size_t>(d)]) return false;
  }
  return true;
}

at::Tensor Flat(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

std::string TextOf(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  if (of_torch == nullptr) return error.what();
  const std::string text = of_torch->what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

std::string TextOfCurrent() {
  try {
    throw;
  } catch (const std::exception& error) {
    const std::string text = TextOf(error);
    return text.empty() ? "an exception without a text" : text;
  } catch (...) {
    return "an exception of unknown type";
  }
}

std::string WhyNoMemory(const std::exception& error) { return "out of memory: " + TextOf(error); }

void NoteOverwritten(const at::Tensor& tensor) {
  // Inference tensors have no version.
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

std::int64_t VersionOf(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::int64_t>(tensor._version());
}

bool HaveSameElements(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.scalar_type() == b.scalar_type() &&
         a.numel() == b.numel() &&
         ((a.is_contiguous() && b.is_contiguous()) ||
          (a.sizes() == b.sizes() && a.strides() == b.strides()));
}

std::string TypeAndShape(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  const auto dtype = DTypeOf(tensor.scalar_type());
  const std::string type(dtype ? core::DTypeName(*dtype) : c10::toString(tensor.scalar_type()));
  return type + (tensor.is_nested() ? ", nested" : " " + core::ShapeText(tensor.sizes()));
}

}  // namespace sirtaki::detail
