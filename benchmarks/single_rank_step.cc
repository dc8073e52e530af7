// What the wrapper costs in a world of one: step() of DistributedOptimizer against the bare
// optimizer.
//
//   single_rank_step [--rounds N]
#include <sirtaki/torch.h>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <string>

#include "benchmarks/support/measure.h"

namespace sirtaki::benchmarks {
namespace {

torch::nn::Sequential MakeModel(std::int64_t width) {
  torch::nn::Sequential model;
  for (int i = 0; i < 10; ++i) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::ReLU());
  }
  return model;
}

void MakeGradients(torch::nn::Sequential& model) {
  for (at::Tensor& parameter : model->parameters())
    parameter.mutable_grad() = at::zeros_like(parameter);
}

Row Step(std::int64_t width, int rounds) {
  constexpr int kSteps = 200;
  torch::nn::Sequential ours_model = MakeModel(width);
  torch::nn::Sequential bare_model = MakeModel(width);
  MakeGradients(ours_model);
  MakeGradients(bare_model);
  const auto options = torch::optim::SGDOptions(0.01).momentum(0.9);
  auto ours = DistributedOptimizer(torch::optim::SGD(ours_model->parameters(), options),
                                   ours_model->named_parameters());
  torch::optim::SGD bare(bare_model->parameters(), options);
  const auto timed = [](torch::optim::Optimizer& optimizer) {
    const auto start = Clock::now();
    for (int i = 0; i < kSteps; ++i) optimizer.step();
    return Seconds(Clock::now() - start) / kSteps;
  };
  const Pair pair = Interleave(
      rounds, [&] { return timed(ours); }, [&] { return timed(bare); });
  return {"step() of 20 parameters, width " + std::to_string(width),
          1,
          pair.ours * 1e6,
          "us",
          "bare SGD",
          pair.reference * 1e6};
}

int Main(int argc, char** argv) {
  const int rounds = std::stoi(Flag(argc, argv, "rounds", "31"));
  init(argc, argv);
  for (const std::int64_t width : {8, 256}) Emit(Step(width, rounds));
  shutdown();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("single_rank_step", [&] { return Main(argc, argv); });
}
