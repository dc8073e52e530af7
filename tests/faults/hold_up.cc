// hold_up VICTIM FILE [--sirtaki-…]: trains a small net on every rank, rank VICTIM more slowly than
// the others; in its 20th step it waits until FILE is there.
//
// Each rank prints "rank R is process P" first, rank VICTIM "held up" when it begins to wait, and
// each in the end "rank R: S steps, waited W s, at work for T s".
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "sirtaki/torch.h"

namespace {

constexpr int kSteps = 40;
constexpr int kHeldStep = 20;
constexpr auto kWork = std::chrono::milliseconds(10);
constexpr auto kLook = std::chrono::milliseconds(5);
constexpr auto kLimit = std::chrono::seconds(180);

// False if the file does not come.
bool WaitFor(const std::string& file) {
  const auto end = std::chrono::steady_clock::now() + kLimit;
  while (!std::filesystem::exists(file)) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  sirtaki::init(argc, argv);
  if (argc != 3) {
    std::fputs("usage: hold_up VICTIM FILE [--sirtaki-option=value]...\n", stderr);
    return 2;
  }
  const bool is_victim = sirtaki::rank() == std::atoi(argv[1]);
  std::printf("rank %d is process %d\n", sirtaki::rank(), getpid());
  std::fflush(stdout);

  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(64, 32), torch::nn::ReLU(),
                              torch::nn::Linear(32, 1));
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.01));
  auto optimizer = sirtaki::DistributedOptimizer(std::move(sgd), model->named_parameters());
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const torch::Tensor loss = model->forward(torch::randn({8, 64})).square().mean();
    if (is_victim) {
      sirtaki::MarkedSpan span("held up");
      std::this_thread::sleep_for(kWork);
      if (step == kHeldStep) {
        std::puts("held up");
        std::fflush(stdout);
        if (!WaitFor(argv[2])) return 4;
      }
    }
    loss.backward();
    optimizer.step();
  }
  const sirtaki::Metrics metrics = sirtaki::metrics();
  std::printf("rank %d: %lld steps, waited %.3f s, at work for %.3f s\n", sirtaki::rank(),
              static_cast<long long>(metrics.steps), metrics.wait_seconds, metrics.step_seconds);
  sirtaki::shutdown();
  return 0;
}
