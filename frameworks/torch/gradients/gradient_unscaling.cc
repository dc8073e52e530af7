#include "frameworks/torch/gradients/gradient_unscaling.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "frameworks/torch/state/optimizer_archive.h"
#include "sirtaki/optimizer.h"

namespace sirtaki::detail {
namespace {

using Tensors = std::vector<at::Tensor>;

struct ByDevice {
  bool operator()(c10::Device a, c10::Device b) const {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  }
};

// LibTorch's kernel takes lists of one type on one device.
using GradientLists = std::map<c10::Device, std::map<at::ScalarType, Tensors>, ByDevice>;

GradientLists GradientsOf(torch::optim::Optimizer& optimizer) {
  GradientLists lists;
  for (const at::Tensor& parameter : DistinctParametersOf(optimizer)) {
    if (!parameter.grad().defined()) continue;
    at::Tensor gradient = parameter.mutable_grad().detach();
    if (gradient.is_sparse()) {
      // Parts of one element that are finite may have a sum that is not.
      if (!gradient.is_coalesced()) {
        gradient = gradient.coalesce();
        parameter.mutable_grad() = gradient;
      }
      gradient = gradient.values();
    }
    lists[gradient.device()][gradient.scalar_type()].push_back(std::move(gradient));
  }
  const GradientReducer* const reducer = ReducerOf(optimizer);
  if (reducer == nullptr) return lists;
  if (std::optional<Tensors> shards = reducer->gradient_shards()) {
    for (at::Tensor& shard : *shards) {
      lists[shard.device()][shard.scalar_type()].push_back(std::move(shard));
    }
  }
  return lists;
}

// The parameters decide on the place, not the gradients that this rank has.
c10::Device PlaceOfFlag(const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.requires_grad() && parameter.is_cuda()) return parameter.device();
    }
  }
  return c10::kCPU;
}

// LibTorch's, which takes no bfloat16 on a GPU: there each goes by float32 and back.
void UnscaleAlike(Tensors& list, at::Tensor& infinite, const at::Tensor& factor) {
  if (infinite.is_cpu() || list.front().scalar_type() != at::kBFloat16) {
    at::_amp_foreach_non_finite_check_and_unscale_(list, infinite, factor);
    return;
  }
  for (at::Tensor& gradient : list) {
    const Tensors wide = {gradient.to(at::kFloat)};
    at::_amp_foreach_non_finite_check_and_unscale_(wide, infinite, factor);
    gradient.copy_(wide.front());
  }
}

// Unscales gradients on one device. Returns the flag that tells whether one of them is not finite.
at::Tensor UnscaleOn(c10::Device device, std::map<at::ScalarType, Tensors>& lists, double scale) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  at::Tensor infinite = at::zeros({1}, options);
  for (auto& [type, list] : lists) {
    // The kernel's factor is float32, which is not enough for float64.
    const bool is_double = type == at::kDouble;
    const at::Tensor factor = at::full({1}, is_double ? 1.0 : 1.0 / scale, options);
    UnscaleAlike(list, infinite, factor);
    if (!is_double) continue;
    for (at::Tensor& gradient : list) gradient.div_(scale);
  }
  return infinite;
}

}  // namespace

at::Tensor Unscale(torch::optim::Optimizer& optimizer, double scale) {
  const at::NoGradGuard no_grad;
  const c10::Device place = PlaceOfFlag(optimizer);
  at::Tensor flag = at::empty({3}, at::TensorOptions().dtype(at::kFloat).device(place));
  flag.select(0, 1).fill_(scale);
  flag.select(0, 2).fill_(-scale);
  at::Tensor all = flag.narrow(0, 0, 1).zero_();
  for (auto& [device, lists] : GradientsOf(optimizer)) {
    const at::Tensor infinite = UnscaleOn(device, lists, scale);
    if (device == place) {
      all.add_(infinite);
    } else if (!device.is_cpu()) {
      all.add_(infinite.to(place, /*non_blocking=*/true));
    } else if (infinite.item<float>() != 0) {
      all.fill_(1);  // a copy from the CPU to a GPU would wait for that
    }
  }
  all.clamp_max_(1);
  return flag;
}

LateFlag::LateFlag(const at::Tensor& flag) : on_host_(flag) {
  if (flag.is_cpu()) return;
  on_host_ = at::empty(flag.sizes(), at::TensorOptions().dtype(at::kFloat).pinned_memory(true));
  on_host_.copy_(flag, /*non_blocking=*/true);
  // An event goes to its device and back, and would make a context wherever the thread is.
  const c10::Device device = flag.device();
  const c10::DeviceGuard guard(device);
  ready_ = std::shared_ptr<c10::Event>(new c10::Event(device.type()), [device](c10::Event* event) {
    try {
      const c10::DeviceGuard there(device);
      delete event;
    } catch (const c10::Error&) {
      // CUDA has gone, and the event with it.
    }
  });
  ready_->record(c10::impl::getDeviceGuardImpl(device.type())->getStream(device));
}

float LateFlag::At(std::size_t index) {
  if (ready_) ready_->synchronize();
  return on_host_.const_data_ptr<float>()[index];
}

}  // namespace sirtaki::detail
