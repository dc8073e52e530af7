// too_large pipeline|whole LAYERS: trains LAYERS equal layers, each of which takes 32 MiB with its
// gradient, for some steps: as a pipeline, of which each rank makes the layers of its stage alone, or
// whole. Prints "trained: LOSS to LOSS" on rank 0, and on each "rank R took M MiB", its own memory.
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace sirtaki::tests {
namespace {

constexpr std::int64_t kWidth = 2048;
constexpr std::int64_t kBatch = 4;
constexpr int kMicroBatches = 2;
constexpr int kSteps = 3;

torch::nn::Sequential MakeLayers(int count) {
  torch::nn::Sequential layers;
  for (int i = 0; i < count; ++i) {
    torch::nn::Linear layer(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
    torch::nn::init::eye_(layer->weight);
    layers->push_back(layer);
  }
  return layers;
}

// "VmHWM" of this process is the most that it had at a time.
std::int64_t MostMebibytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6)) / 1024;
  }
  return -1;
}

void Tell(double first, double last) {
  if (rank() == 0) std::printf("trained: %.6f to %.6f\n", first, last);
  std::printf("rank %d took %lld MiB\n", rank(), static_cast<long long>(MostMebibytes()));
}

template <class Train>
void TrainSteps(const std::vector<torch::Tensor>& parameters, const Train& train) {
  torch::optim::SGD sgd(parameters, 0.0025);
  const torch::Tensor input = torch::ones({kBatch, kWidth});
  const torch::Tensor target = torch::full({kBatch, kWidth}, 2.0);
  double first = 0;
  double last = 0;
  for (int step = 0; step < kSteps; ++step) {
    sgd.zero_grad(/*set_to_none=*/true);
    last = train(input, target);
    if (step == 0) first = last;
    sgd.step();
  }
  Tell(first, last);
}

void TrainPipeline(int layers) {
  const int count = layers / size();
  std::vector<PipelineFactory> stages;
  for (int stage = 0; stage < size(); ++stage) {
    stages.emplace_back([count] { return PipelineStage(MakeLayers(count)); });
  }
  Pipeline pipeline(stages, torch::nn::MSELoss(), PipelineOptions().micro_batches(kMicroBatches));
  TrainSteps(pipeline.parameters(), [&](const torch::Tensor& input, const torch::Tensor& target) {
    return pipeline.train_batch(input, target);
  });
}

void TrainWhole(int layers) {
  torch::nn::Sequential model = MakeLayers(layers);
  TrainSteps(model->parameters(), [&](const torch::Tensor& input, const torch::Tensor& target) {
    double sum = 0;
    const auto inputs = input.chunk(kMicroBatches);
    const auto targets = target.chunk(kMicroBatches);
    for (int i = 0; i < kMicroBatches; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const torch::Tensor loss =
          torch::mse_loss(model->forward(inputs[at]), targets[at]) / kMicroBatches;
      loss.backward();
      sum += loss.item<double>();
    }
    return sum;
  });
}

}  // namespace
}  // namespace sirtaki::tests

int main(int argc, char** argv) {
  sirtaki::init(argc, argv);
  if (argc != 3) {
    std::fprintf(stderr, "usage: too_large pipeline|whole LAYERS\n");
    return 2;
  }
  torch::set_num_threads(1);
  const int layers = std::atoi(argv[2]);
  if (std::string(argv[1]) == "pipeline") {
    sirtaki::tests::TrainPipeline(layers);
  } else {
    sirtaki::tests::TrainWhole(layers);
  }
  sirtaki::shutdown();
  return 0;
}
