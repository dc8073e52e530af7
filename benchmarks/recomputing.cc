// What recompute() costs and saves: training steps of a transformer, each of whose blocks keeps its
// inside for backward() or runs again. The driver starts the variants in turn and looks at memory.
//
//   recomputing ours|plain [--blocks N] [--batch N] [--length N] [--width N] [--steps N]
#include <sirtaki/recompute.h>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/support/measure.h"

namespace sirtaki::benchmarks {
namespace {

struct Shape {
  int blocks = 12;
  std::int64_t batch = 8;
  std::int64_t length = 256;
  std::int64_t width = 384;
};

double Step(std::vector<torch::nn::TransformerEncoderLayer>& blocks, const at::Tensor& input,
            torch::optim::SGD& optimizer, bool ours) {
  const auto start = Clock::now();
  optimizer.zero_grad();
  at::Tensor x = input;
  for (torch::nn::TransformerEncoderLayer& block : blocks) {
    const auto run = [block](const at::Tensor& y) mutable { return block->forward(y); };
    x = ours ? recompute(run, x) : block->forward(x);
  }
  x.square().mean().backward();
  optimizer.step();
  return Seconds(Clock::now() - start);
}

int Main(int argc, char** argv) {
  const std::string variant = argc > 1 ? argv[1] : "";
  if (variant != kOurs && variant != "plain") throw std::invalid_argument("which variant?");
  Shape shape;
  shape.blocks = std::stoi(Flag(argc, argv, "blocks", "12"));
  shape.batch = std::stoll(Flag(argc, argv, "batch", "8"));
  shape.length = std::stoll(Flag(argc, argv, "length", "256"));
  shape.width = std::stoll(Flag(argc, argv, "width", "384"));
  const int steps = std::stoi(Flag(argc, argv, "steps", "5"));
  at::set_num_threads(1);
  at::manual_seed(0);
  std::vector<torch::nn::TransformerEncoderLayer> blocks;
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < shape.blocks; ++i) {
    blocks.emplace_back(torch::nn::TransformerEncoderLayerOptions(shape.width, shape.width / 64)
                            .dim_feedforward(4 * shape.width));
    for (const at::Tensor& parameter : blocks.back()->parameters()) parameters.push_back(parameter);
  }
  const at::Tensor input = at::randn({shape.length, shape.batch, shape.width});
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.01));
  Step(blocks, input, optimizer, variant == kOurs);
  std::vector<double> times;
  for (int i = 0; i < steps; ++i) {
    times.push_back(Step(blocks, input, optimizer, variant == kOurs));
  }
  Emit(Sample{"step", 1, variant, Median(std::move(times)) * 1e3, "ms"});
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("recomputing", [&] { return Main(argc, argv); });
}
