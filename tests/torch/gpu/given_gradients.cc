#include "tests/torch/gpu/given_gradients.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "tests/torch/gpu/fake_cuda.h"

namespace sirtaki::tests {
namespace {

// A scalar on the host, whose gradient by the parameter is whatever is in new memory.
struct Scalar : torch::autograd::Function<Scalar> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& parameter) {
    context->saved_data["parameter"] = parameter.detach();
    return at::zeros({});
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& /*ones*/) {
    const at::Tensor parameter = context->saved_data["parameter"].toTensor();
    return {at::empty_strided(parameter.sizes(), parameter.strides(), parameter.options())};
  }
};

}  // namespace

at::Tensor GivenGradients::Add(const std::string& name, at::IntArrayRef shape, at::Device device,
                               ops::cuda::StreamHandle stream) {
  at::Tensor parameter = at::empty(shape, at::TensorOptions().dtype(at::kFloat).device(device));
  parameter.zero_();
  parameter.requires_grad_();
  const auto given = std::make_shared<at::Tensor>();
  // On autograd's thread of the device, before the gradient is put where it belongs.
  parameter.register_hook([given, device, stream](const at::Tensor& gradient) {
    if (device.is_cuda()) SetCurrentStream(device.index(), stream);
    // In memory of that stream: autograd lets go of it where it adds to a gradient that was kept.
    at::Tensor made = at::empty_strided(gradient.sizes(), gradient.strides(), gradient.options());
    made.copy_(*given, /*non_blocking=*/true);
    return made;
  });
  named_.emplace_back(name, parameter);
  given_[name] = given;
  return parameter;
}

void GivenGradients::Backward(const std::vector<Gradient>& gradients) {
  at::Tensor loss = at::zeros({});
  // Autograd takes the youngest first.
  for (auto gradient = gradients.rbegin(); gradient != gradients.rend(); ++gradient) {
    const at::Tensor& parameter = (*this)[gradient->name];
    at::Tensor& given = *given_.at(gradient->name);
    given = gradient->elements.empty() ? at::full(parameter.sizes(), gradient->value)
                                       : at::tensor(gradient->elements).view(parameter.sizes());
    kept_.push_back(given);
    loss = loss + Scalar::apply(parameter);
  }
  loss.backward();
}

const at::Tensor& GivenGradients::operator[](const std::string& name) const {
  for (const auto& [other, parameter] : named_) {
    if (other == name) return parameter;
  }
  throw std::out_of_range(name);
}

DistributedOptimizer<torch::optim::SGD> GivenGradients::Wrap(
    const DistributedOptimizerOptions& options) const {
  std::vector<at::Tensor> parameters;
  for (const auto& [name, parameter] : named_) parameters.push_back(parameter);
  return DistributedOptimizer<torch::optim::SGD>(
      torch::optim::SGD(std::move(parameters), torch::optim::SGDOptions(1.0)), named_, options);
}

}  // namespace sirtaki::tests
