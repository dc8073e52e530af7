// lose_in_a_pipeline PLACE VICTIM [--sirtaki-…]: trains a pipeline of three stages, of which the first
// and the last have a parameter in common and a skip connection between them, until rank VICTIM kills
// itself in the second batch.
//
//   forward    in the forward pass of its stage for micro-batch 2
//   backward   in its backward pass for micro-batch 1
//   tied       in its last backward pass, behind which tied parameters are summed and the loss is told
//   evaluate   in the forward pass for micro-batch 1 of an evaluation
//
// Each rank prints "rank R is process P" first. The others print "rank R after T ms: ERROR", which
// train_batch() or evaluate_batch() has thrown, and end with code 3 when all have told their error.
#include <sirtaki/torch.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "tests/faults/told.h"

namespace sirtaki::tests {
namespace {

constexpr int kStages = 3;
constexpr int kMicroBatches = 4;
constexpr std::int64_t kWidth = 64;

[[noreturn]] void Kill() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

// Where this rank kills itself, armed in the victim's last batch.
struct Loss {
  std::string place;
  bool armed = false;
  int forward = 0;  // passes of this batch
  int backward = 0;

  void OnForward() {
    const int now = forward++;
    if (!armed) return;
    if (place == "forward" && now == 2) Kill();
    if (place == "evaluate" && now == 1) Kill();
  }
  void OnBackward() {
    const int now = backward++;
    if (!armed) return;
    if (place == "backward" && now == 1) Kill();
    if (place == "tied" && now == kMicroBatches - 1) Kill();
  }
};

struct StageImpl : torch::nn::Module {
  StageImpl(int of_stage, Loss& of_loss) : stage(of_stage), loss(of_loss) {
    linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
  }
  std::vector<torch::Tensor> forward(const std::vector<torch::Tensor>& inputs) {
    loss.OnForward();
    torch::Tensor x = linear->forward(inputs[0]);
    if (x.requires_grad()) {
      x.register_hook([this](const torch::Tensor&) { loss.OnBackward(); });
    }
    if (inputs.size() > 1) x = x + inputs[1];
    if (stage == 0) return {torch::tanh(x), x};
    return {torch::tanh(x)};
  }
  int stage;
  Loss& loss;
  torch::nn::Linear linear{nullptr};
};

int Run(int argc, char** argv) {
  if (argc < 3) {
    Say("usage: lose_in_a_pipeline PLACE VICTIM [--sirtaki-option=value]...");
    return 2;
  }
  Loss loss;
  loss.place = argv[1];
  const int victim = std::atoi(argv[2]);
  init(argc, argv);
  Say("rank " + std::to_string(rank()) + " is process " + std::to_string(getpid()));
  torch::set_num_threads(1);
  std::vector<PipelineFactory> stages;
  for (int stage = 0; stage < kStages; ++stage) {
    stages.emplace_back(
        [&loss, stage] { return PipelineStage(std::make_shared<StageImpl>(stage, loss)); });
  }
  Pipeline pipeline(stages, torch::nn::MSELoss(),
                    PipelineOptions()
                        .micro_batches(kMicroBatches)
                        .skips({{"far", 0, kStages - 1}})
                        .ties({{"0.linear.weight", "2.linear.weight"}}));
  const auto batch = torch::ones({32 * kMicroBatches, kWidth});
  for (int step = 0;; ++step) {
    loss.armed = rank() == victim && step == 1;
    loss.forward = 0;
    loss.backward = 0;
    const auto begin = std::chrono::steady_clock::now();
    try {
      if (step == 1 && loss.place == "evaluate") {
        pipeline.evaluate_batch(batch, batch);
      } else {
        pipeline.train_batch(batch, batch);
      }
    } catch (const Error& error) {
      const auto time = std::chrono::duration_cast<std::chrono::milliseconds>(
          std::chrono::steady_clock::now() - begin);
      Say("rank " + std::to_string(rank()) + " after " + std::to_string(time.count()) +
          " ms: " + error.what());
      break;
    }
  }
  AwaitTheOthers(kStages - 1);
  return 3;
}

}  // namespace
}  // namespace sirtaki::tests

int main(int argc, char** argv) { return sirtaki::tests::Run(argc, argv); }
