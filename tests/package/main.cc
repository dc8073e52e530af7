// The smallest program that trains with Sirtaki; built by tests/package/run.sh as a user would
// build it.

#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>
#include <utility>

int main() {
  sirtaki::init();
  torch::manual_seed(sirtaki::rank());
  torch::nn::Linear model(4, 1);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.1));
  auto optimizer = sirtaki::DistributedOptimizer(std::move(sgd), model->named_parameters());
  sirtaki::broadcast_parameters(*model, /*root_rank=*/0);

  const torch::Tensor input = torch::ones({8, 4});
  double first = 0;
  double last = 0;
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss = model->forward(input).pow(2).mean();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::cout << "rank " << sirtaki::rank() << " of " << sirtaki::size() << ": loss " << first
            << " to " << last << "\n";
  const bool learned = std::isfinite(last) && last < first;
  sirtaki::shutdown();
  return learned ? 0 : 1;
}
