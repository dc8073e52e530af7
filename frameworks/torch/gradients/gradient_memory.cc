#include "frameworks/torch/gradients/gradient_memory.h"

#include <ATen/TensorUtils.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <memory>

namespace sirtaki::detail {

std::vector<std::int64_t> ContractStrides(const at::Tensor& parameter) {
  return parameter.is_non_overlapping_and_dense() ? parameter.strides().vec()
                                                  : at::detail::defaultStrides(parameter.sizes());
}

bool HasContractStrides(const at::Tensor& parameter, at::IntArrayRef strides) {
  return parameter.is_non_overlapping_and_dense()
             ? parameter.strides() == strides
             : strides.equals(at::detail::defaultStrides(parameter.sizes()));
}

at::Tensor EmptyForBackend(const at::Tensor& like, at::IntArrayRef strides,
                           session::Session& session) {
  const at::TensorOptions options = like.options().requires_grad(false).layout(at::kStrided);
  // Where memory of no particular place is as good as the backend's, LibTorch's allocator is
  // better; on a GPU it always is.
  if (!like.device().is_cpu() || !session.HasPool())
    return at::empty_strided(like.sizes(), strides, options);
  using Memory = std::shared_ptr<void>;
  auto memory = std::make_unique<Memory>(
      session.AllocateShared(like.numel() * static_cast<std::int64_t>(like.element_size())));
  void* const data = memory->get();
  // A std::function as deleter would be allocated three times.
  return at::for_blob(data, like.sizes())
      .strides(strides)
      .context(memory.release(), [](void* kept) { delete static_cast<Memory*>(kept); })
      .options(options)
      .make_tensor();
}

}  // namespace sirtaki::detail
