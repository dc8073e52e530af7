// A small training by the C++ API, whose twin in Python is twin.py: both print the same, to the
// last bit.
#include <sirtaki/torch.h>

#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <utility>
#include <vector>

#include "powersgd.h"

namespace {

// FNV-1a over the bytes of all tensors.
std::uint64_t Digest(const std::vector<at::Tensor>& tensors) {
  std::uint64_t digest = 14695981039346656037ull;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor flat = tensor.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(flat.data_ptr());
    for (std::size_t i = 0; i < flat.nbytes(); ++i) digest = (digest ^ bytes[i]) * 1099511628211ull;
  }
  return digest;
}

// Numbers between -1 and 1 that no generator of random numbers has a part in.
at::Tensor Numbers(std::int64_t count, std::int64_t seed) {
  const at::Tensor places = at::arange(count, at::kLong);
  return ((places * 7919 + seed * 104729).remainder(2003)).to(at::kFloat) / 1001 - 1;
}

void Print(const char* what, std::uint64_t digest) {
  if (sirtaki::rank() == 0) {
    std::printf("%s %016llx\n", what, static_cast<unsigned long long>(digest));
  }
}

// The gradients of the examples' PowerSGD, of which one is not finite on a rank. Its state goes
// through the mean that a checkpoint holds.
void PrintPowerSgd(at::ScalarType type) {
  std::vector<at::Tensor> parameters;
  for (const std::vector<std::int64_t>& shape :
       std::vector<std::vector<std::int64_t>>{{24, 2, 20}, {4, 4}, {24}, {30, 50}}) {
    parameters.push_back(at::zeros(shape, type).requires_grad_());
  }
  examples::PowerSGD powersgd(/*rank=*/2, /*start=*/2, /*seed=*/5);
  auto optimizer = sirtaki::DistributedOptimizer(
      torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1)),
      sirtaki::DistributedOptimizerOptions().hook(std::ref(powersgd)));
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = at::zeros({}, type);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const std::int64_t seed = 300 + 40 * step + 10 * sirtaki::rank() + static_cast<int>(i);
      at::Tensor gradient = Numbers(parameters[i].numel(), seed).to(type);
      if (step == 4 && sirtaki::rank() == 0) gradient[7] = std::nan("");
      loss = loss + (parameters[i] * gradient.reshape(parameters[i].sizes())).sum();
    }
    loss.backward();
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& one : parameters) gradients.push_back(one.grad().nan_to_num());
    Print("PowerSGD", Digest(gradients));
    if (step == 5) powersgd.average_left_out();
  }
}

}  // namespace

int main() {
  sirtaki::init();
  at::set_num_threads(1);
  const int rank = sirtaki::rank();
  torch::nn::Sequential model(torch::nn::Linear(30, 200), torch::nn::Linear(200, 150),
                              torch::nn::Linear(150, 5));
  {
    torch::NoGradGuard no_grad;
    std::int64_t seed = 1;
    for (at::Tensor& parameter : model->parameters()) {
      parameter.copy_(Numbers(parameter.numel(), seed++).reshape(parameter.sizes()) / 10);
    }
  }
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  auto optimizer = sirtaki::DistributedOptimizer(std::move(sgd), model->named_parameters());
  sirtaki::broadcast_parameters(*model, 0);
  for (int step = 0; step < 6; ++step) {
    const at::Tensor x = Numbers(20 * 30, 100 + 10 * step + rank).reshape({20, 30});
    const at::Tensor y = Numbers(20 * 5, 200 + 10 * step + rank).reshape({20, 5});
    optimizer.zero_grad();
    torch::nn::functional::mse_loss(model->forward(x), y).backward();
    optimizer.synchronize();
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : model->parameters()) gradients.push_back(parameter.grad());
    Print("gradients", Digest(gradients));
    optimizer.step();
    Print("parameters", Digest(model->parameters()));
  }
  const at::Tensor sum = sirtaki::allreduce(Numbers(5000, rank),
                                            sirtaki::AllreduceOptions().prescale(0.3).postscale(7));
  Print("all-reduce", Digest({sum}));
  Print("Adasum",
        Digest({sirtaki::allreduce(Numbers(5000, rank),
                                   sirtaki::AllreduceOptions().op(sirtaki::ReduceOp::Adasum))}));
  Print("float16", Digest({sirtaki::allreduce(Numbers(5000, rank).to(at::kHalf))}));
  PrintPowerSgd(at::kFloat);
  PrintPowerSgd(at::kHalf);
  sirtaki::shutdown();
  return 0;
}
