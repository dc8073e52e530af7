// What LibTorch computes on a GPU, for the fake one: by LibTorch's kernels for the CPU, on the same
// memory, when what stands in the calling thread's stream before it is over. A result that the
// stream does not wait for is thus not found. Those of SyncBatchNorm, which are there for GPUs
// alone, are written out, with the types that the real ones insist on.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/torch/gpu/fake_cuda.h"

namespace sirtaki::tests {
namespace {

using MaybeTensor = std::optional<at::Tensor>;

// The same sparse tensor with these parts.
at::Tensor SparseOf(const at::Tensor& like, const at::Tensor& indices, const at::Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes())
      ._coalesced_(like.is_coalesced());
}

// The same memory as a tensor on the CPU.
at::Tensor Unwrapped(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  if (tensor.is_sparse()) {
    return SparseOf(tensor, Unwrapped(tensor._indices()), Unwrapped(tensor._values()));
  }
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), tensor.scalar_type());
  WaitForStream(tensor.device());
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()));
}

// Its values in memory of the GPU's.
at::Tensor OnGpu(const at::Tensor& tensor, c10::Device device) {
  if (tensor.is_sparse()) {
    return SparseOf(tensor, OnGpu(tensor._indices(), device), OnGpu(tensor._values(), device));
  }
  const at::Tensor on_gpu = at::empty_strided(
      tensor.sizes(), tensor.strides(), at::TensorOptions(device).dtype(tensor.scalar_type()));
  if (tensor.numel() > 0) Unwrapped(on_gpu).copy_(tensor);
  return on_gpu;
}

// Those that wait for the GPU, since they give the host a number, or a tensor of a size that only
// the values tell.
bool AsksTheGpu(const std::string& op) {
  static const std::set<std::string> all = {
      "aten::_local_scalar_dense", "aten::equal",    "aten::is_nonzero", "aten::nonzero",
      "aten::masked_select",       "aten::_unique2", "aten::unique_dim", "aten::_coalesce"};
  return all.count(op) != 0;
}

// One call of an operator, of which the arguments are on the GPU.
class HostCall {
 public:
  void Run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const std::size_t inputs = op.schema().arguments().size();
    if (op.schema().name() == "aten::_local_scalar_dense") {
      NoteReadBack(stack->back().toTensor().device());
    }
    for (std::size_t i = stack->size() - inputs; i < stack->size(); ++i) {
      (*stack)[i] = ToHost((*stack)[i]);
    }
    if (AsksTheGpu(op.schema().name())) NoteReadBack(*device_);
    op.redispatchBoxed(
        c10::DispatchKeySet(sparse_ ? c10::DispatchKey::SparseCPU : c10::DispatchKey::CPU), stack);
    for (const at::Tensor& on_host : kept_) Resize(on_host);
    const std::size_t outputs = op.schema().returns().size();
    for (std::size_t i = stack->size() - outputs; i < stack->size(); ++i) {
      (*stack)[i] = ToGpu((*stack)[i]);
    }
  }

 private:
  at::Tensor ToHost(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    device_ = tensor.device();
    sparse_ |= tensor.is_sparse();
    // An output that the operator is to resize begins without memory.
    at::Tensor on_host = Unwrapped(tensor);
    originals_.emplace(on_host.unsafeGetTensorImpl(), tensor);
    kept_.push_back(on_host);
    return on_host;
  }

  c10::IValue ToHost(const c10::IValue& value) {
    if (value.isTensor()) return ToHost(value.toTensor());
    if (value.isDevice() && value.toDevice().is_cuda()) {
      device_ = value.toDevice();
      return c10::Device(c10::kCPU);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(ToHost(one));
      return list;
    }
    return value;
  }

  void Resize(const at::Tensor& on_host) const {
    const at::Tensor& original = originals_.at(on_host.unsafeGetTensorImpl());
    if (original.numel() == on_host.numel()) return;
    at::TensorImpl& impl = *original.unsafeGetTensorImpl();
    impl.set_storage_keep_dtype(OnGpu(on_host, *device_).storage());
    impl.set_sizes_and_strides(on_host.sizes(), on_host.strides(), 0);
  }

  c10::IValue ToGpu(const c10::IValue& value) const {
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(ToGpu(one).toTensor());
      return list;
    }
    if (!value.isTensor() || !value.toTensor().defined()) return value;
    const auto original = originals_.find(value.toTensor().unsafeGetTensorImpl());
    return original != originals_.end() ? original->second : OnGpu(value.toTensor(), *device_);
  }

  std::optional<c10::Device> device_;
  bool sparse_ = false;  // one of the arguments is
  std::map<const void*, at::Tensor> originals_;
  std::vector<at::Tensor> kept_;
};

void ComputeOnHost(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (op.schema().name() == "aten::_amp_foreach_non_finite_check_and_unscale_") {
    for (const at::Tensor& gradient : (*stack)[stack->size() - 3].toTensorVector()) {
      TORCH_CHECK_NOT_IMPLEMENTED(gradient.scalar_type() != at::kBFloat16,
                                  "not implemented for 'BFloat16'");  // unlike that of the CPU
    }
  }
  HostCall().Run(op, stack);
}

// ---- SyncBatchNorm's ----

at::ScalarType Accumulating(at::ScalarType type) {
  return at::isReducedFloatingType(type) ? at::kFloat : type;
}

// [C] against [N, C, ...].
at::Tensor Along(const at::Tensor& by_channel, const at::Tensor& x) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(x.dim()), 1);
  shape[1] = x.size(1);
  return by_channel.to(at::kDouble).reshape(shape);
}

std::vector<std::int64_t> AllButChannels(const at::Tensor& x) {
  std::vector<std::int64_t> dims = {0};
  for (std::int64_t d = 2; d < x.dim(); ++d) dims.push_back(d);
  return dims;
}

at::Tensor Exact(const at::Tensor& tensor) { return Unwrapped(tensor).to(at::kDouble); }

std::tuple<at::Tensor, at::Tensor> Stats(const at::Tensor& input, double eps) {
  TORCH_CHECK(input.numel() > 0);
  const at::Tensor x = Exact(input);
  const auto type = Accumulating(input.scalar_type());
  const at::Tensor variance = x.var(AllButChannels(x), /*unbiased=*/false);
  return {OnGpu(x.mean(AllButChannels(x)).to(type), input.device()),
          OnGpu((variance + eps).rsqrt().to(type), input.device())};
}

std::tuple<at::Tensor, at::Tensor> GatherStats(const at::Tensor& self, const at::Tensor& means,
                                               const at::Tensor& invstds,
                                               const MaybeTensor& running_mean,
                                               const MaybeTensor& running_var, double momentum,
                                               double eps, const at::Tensor& counts) {
  const bool runs = running_mean && running_mean->defined();
  const auto type = runs ? running_mean->scalar_type() : self.scalar_type();
  TORCH_CHECK(counts.scalar_type() == type && means.scalar_type() == Accumulating(type));
  const at::Tensor m = Exact(means);
  const at::Tensor squares = (Exact(invstds).pow(-2) - eps) * Exact(counts).unsqueeze(1);
  at::Tensor mean = at::zeros_like(m[0]);
  at::Tensor sum = at::zeros_like(mean);
  double n = 0;
  for (std::int64_t r = 0; r < m.size(0); ++r) {
    const double count = Exact(counts)[r].item<double>();
    const double factor = 1 / (n + count);
    sum += squares[r] + (mean - m[r]).pow(2) * n * count * factor;
    mean = mean * (n * factor) + m[r] * (count * factor);
    n += count;
  }
  if (runs) {
    Unwrapped(*running_mean).mul_(1 - momentum).add_(mean.to(type), momentum);
    Unwrapped(*running_var).mul_(1 - momentum).add_((sum / (n - 1)).to(type), momentum);
  }
  return {OnGpu(mean.to(means.scalar_type()), means.device()),
          OnGpu((sum / n + eps).rsqrt().to(means.scalar_type()), means.device())};
}

at::Tensor Elemt(const at::Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                 const at::Tensor& mean, const at::Tensor& invstd, double /*eps*/) {
  TORCH_CHECK(mean.scalar_type() == Accumulating(input.scalar_type()));
  const at::Tensor x = Exact(input);
  at::Tensor y = (x - Along(Exact(mean), x)) * Along(Exact(invstd), x);
  if (weight && weight->defined()) y = y * Along(Exact(*weight), x) + Along(Exact(*bias), x);
  return OnGpu(y.to(input.scalar_type()).contiguous(input.suggest_memory_format()), input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> BackwardReduce(
    const at::Tensor& dy, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd,
    const MaybeTensor& weight, bool /*input_g*/, bool weight_g, bool bias_g) {
  TORCH_CHECK(input.numel() > 0 && dy.scalar_type() == input.scalar_type());
  const at::Tensor x = Exact(input);
  const at::Tensor sum = Exact(dy).sum(AllButChannels(x));
  const at::Tensor sum_x = (Exact(dy) * (x - Along(Exact(mean), x))).sum(AllButChannels(x));
  const auto on_gpu = [&](const at::Tensor& value, at::ScalarType type) {
    return OnGpu(value.to(type), input.device());
  };
  return {on_gpu(sum, mean.scalar_type()), on_gpu(sum_x, mean.scalar_type()),
          weight_g ? on_gpu(sum_x * Exact(invstd), weight->scalar_type()) : at::Tensor(),
          bias_g ? on_gpu(sum, weight->scalar_type()) : at::Tensor()};
}

at::Tensor BackwardElemt(const at::Tensor& dy, const at::Tensor& input, const at::Tensor& mean,
                         const at::Tensor& invstd, const MaybeTensor& weight, const at::Tensor& sum,
                         const at::Tensor& sum_x, const at::Tensor& counts) {
  TORCH_CHECK(counts.scalar_type() == at::kInt && sum.scalar_type() == mean.scalar_type());
  const bool has_weight = weight && weight->defined();
  TORCH_CHECK(!has_weight || weight->scalar_type() == mean.scalar_type());
  const at::Tensor x = Exact(input);
  const auto n = Unwrapped(counts).sum().item<double>();
  const at::Tensor scale = Exact(invstd);
  at::Tensor dx = Exact(dy) - Along(Exact(sum) / n, x) -
                  (x - Along(Exact(mean), x)) * Along(scale * scale * Exact(sum_x) / n, x);
  dx = dx * Along(scale, x);
  if (has_weight) dx = dx * Along(Exact(*weight), x);
  return OnGpu(dx.to(input.scalar_type()).contiguous(input.suggest_memory_format()),
               input.device());
}

// On the device of its values, as the real one.
at::Tensor NewSparse(std::int64_t sparse_dim, std::int64_t dense_dim, c10::SymIntArrayRef size,
                     const at::Tensor& indices, const at::Tensor& values,
                     std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
                     std::optional<at::Device> device, std::optional<bool> pinned,
                     std::optional<bool> is_coalesced) {
  const c10::DeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(
      sparse_dim, dense_dim, size, indices, values, type, layout, device, pinned, is_coalesced);
}

// Archives ask for this.
at::Tensor& SetStorage(at::Tensor& self, at::Storage storage, std::int64_t offset,
                       at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::TensorImpl& impl = *self.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(std::move(storage));
  impl.set_sizes_and_strides(sizes, strides, offset);
  return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&ComputeOnHost>());
}

TORCH_LIBRARY_IMPL(_, SparseCUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&ComputeOnHost>());
}

// What a sparse tensor consists of, wherever it is.
TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", NewSparse);
  library.impl("_indices", at::native::_indices_sparse);
  library.impl("_values", at::native::_values_sparse);
  library.impl("indices", at::native::indices_sparse);
  library.impl("values", at::native::values_sparse);
  library.impl("_nnz", at::native::_nnz_sparse);
  library.impl("sparse_dim", at::native::sparse_dim_sparse);
  library.impl("dense_dim", at::native::dense_dim_sparse);
  library.impl("is_coalesced", at::native::is_coalesced_sparse);
  library.impl("_coalesced_", at::native::_coalesced_sparse_);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("set_.source_Storage_storage_offset", SetStorage);
  library.impl("batch_norm_stats", Stats);
  library.impl("batch_norm_gather_stats_with_counts", GatherStats);
  library.impl("batch_norm_elemt", Elemt);
  library.impl("batch_norm_backward_reduce", BackwardReduce);
  library.impl("batch_norm_backward_elemt", BackwardElemt);
}

}  // namespace
}  // namespace sirtaki::tests
