// What layers that are split over ranks cost: training steps of an MLP, split over all ranks, whole on
// one rank while the others rest, and of parts without their communication, in turn.
//
//   mpirun -np 2 --bind-to none tensor_parallel [--blocks N] [--batch N] [--width N] [--hidden N]
//                                               [--rounds N]
#include <sirtaki/barrier.h>
#include <sirtaki/reductions.h>
#include <sirtaki/session.h>
#include <sirtaki/tensor_parallel.h>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/support/measure.h"

namespace sirtaki::benchmarks {
namespace {

struct Shape {
  int blocks = 4;
  std::int64_t batch = 256;
  std::int64_t width = 512;
  std::int64_t hidden = 2048;
};

class Trainer {
 public:
  Trainer(const Shape& shape, torch::nn::Sequential model)
      : model_(std::move(model)),
        sgd_(model_->parameters(), torch::optim::SGDOptions(0.01)),
        input_(at::randn({shape.batch, shape.width})) {}

  double Step() {
    const auto start = Clock::now();
    sgd_.zero_grad();
    model_->forward(input_).square().mean().backward();
    sgd_.step();
    return Seconds(Clock::now() - start);
  }

 private:
  torch::nn::Sequential model_;
  torch::optim::SGD sgd_;
  at::Tensor input_;
};

// `make_first` and `make_second` make the layers of a block.
template <class First, class Second>
Trainer Make(const Shape& shape, const First& make_first, const Second& make_second) {
  at::manual_seed(0);
  torch::nn::Sequential model;
  for (int i = 0; i < shape.blocks; ++i) {
    model->push_back(make_first());
    model->push_back(torch::nn::GELU());
    model->push_back(make_second());
  }
  return Trainer(shape, std::move(model));
}

Trainer MakeWhole(const Shape& shape, std::int64_t hidden) {
  return Make(
      shape, [&] { return torch::nn::Linear(shape.width, hidden); },
      [&] { return torch::nn::Linear(hidden, shape.width); });
}

// Runs it on all ranks, or on the first while the others rest: the time of the slowest.
double Together(const std::function<double()>& run, bool first_alone = false) {
  barrier();
  const double own = first_alone && rank() != 0 ? 0 : run();
  const auto options = AllreduceOptions().op(ReduceOp::Max).name("time");
  return allreduce_(at::full({1}, own, at::kDouble), options).item<double>();
}

int Main(int argc, char** argv) {
  Shape shape;
  shape.blocks = std::stoi(Flag(argc, argv, "blocks", "4"));
  shape.batch = std::stoll(Flag(argc, argv, "batch", "256"));
  shape.width = std::stoll(Flag(argc, argv, "width", "512"));
  shape.hidden = std::stoll(Flag(argc, argv, "hidden", "2048"));
  const int rounds = std::stoi(Flag(argc, argv, "rounds", "15"));
  at::set_num_threads(1);
  init();
  const int ranks = size();
  Trainer split = Make(
      shape,
      [&] { return ColumnParallelLinear(ColumnParallelLinearOptions(shape.width, shape.hidden)); },
      [&] { return RowParallelLinear(RowParallelLinearOptions(shape.hidden, shape.width)); });
  Trainer whole = MakeWhole(shape, shape.hidden);
  Trainer parts = MakeWhole(shape, shape.hidden / ranks);
  const std::vector<Variant> variants = {
      {kOurs, [&] { return Together([&] { return split.Step(); }); }},
      {"one rank alone", [&] { return Together([&] { return whole.Step(); }, true); }},
      {"parts without communication", [&] { return Together([&] { return parts.Step(); }); }},
  };
  const std::vector<double> times = Interleave(rounds, variants);
  if (rank() == 0) {
    for (std::size_t i = 0; i < variants.size(); ++i) {
      Emit(Sample{"step", ranks, variants[i].name, times[i] * 1e3, "ms"});
    }
  }
  shutdown();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("tensor_parallel", [&] { return Main(argc, argv); });
}
