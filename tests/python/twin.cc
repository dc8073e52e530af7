// A small training by the C++ API, whose twin in Python is twin.py: both print the same, to the
// last bit.
#include <sirtaki/torch.h>

#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

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
  sirtaki::shutdown();
  return 0;
}
