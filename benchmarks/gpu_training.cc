// Steps of ResNet-50 on a GPU, wrapped by us beside the bare ones, in float32 and under bfloat16
// autocast, in turn in one process:
//
//   mpirun -np N gpu_training [--works float32,bfloat16,host] [--batch N] [--side N] [--steps N]
//                             [--rounds N]
//   gpu_training --look yes      ends with code 77 and the reason if there is no GPU
//
// A step is timed by the GPU's own events. What our hooks cost the host is seen in steps so small
// that the host, not the GPU, takes the time, and on several ranks only: one has no hooks.
#include <mpi.h>
#include <sirtaki/torch.h>

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/support/measure.h"
#include "examples/device.h"
#include "examples/resnet.h"
#include "tests/support/own_gpu.h"

namespace sirtaki::benchmarks {
namespace {

constexpr int kSkipped = 77;

struct Work {
  std::int64_t batch = 64;
  std::int64_t side = 224;
  int steps = 20;
  int rounds = 5;
};

// A model with an optimizer, wrapped or not, and images that stay on the GPU.
class Trainer {
 public:
  Trainer(const torch::Device& device, std::int64_t batch, std::int64_t side, bool bfloat16,
          bool wrapped)
      : device_(device), bfloat16_(bfloat16) {
    torch::manual_seed(0);
    model_ = resnet::ResNet(50, 1000);
    model_->to(device);
    images_ = torch::randn({batch, 3, side, side}, device);
    targets_ = torch::randint(1000, {batch}, torch::TensorOptions(torch::kLong).device(device));
    torch::optim::SGD sgd(model_->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    if (wrapped) {
      optimizer_ = std::make_unique<DistributedOptimizer<torch::optim::SGD>>(
          std::move(sgd), model_->named_parameters());
      broadcast_parameters(*model_, 0);
    } else {
      optimizer_ = std::make_unique<torch::optim::SGD>(std::move(sgd));
    }
  }

  void Step() {
    optimizer_->zero_grad();
    torch::Tensor logits;
    {
      const examples::Autocast autocast(device_, bfloat16_);
      logits = model_->forward(images_);
    }
    torch::nn::functional::cross_entropy(logits.to(torch::kFloat), targets_).backward();
    optimizer_->step();
  }

 private:
  const torch::Device device_;
  const bool bfloat16_;
  resnet::ResNet model_{nullptr};
  torch::Tensor images_;
  torch::Tensor targets_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

double Slowest(double value) {
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return value;
}

// Milliseconds of the GPU for a step of the slowest rank.
double OnDevice(const torch::Device& device, int steps, Trainer& trainer) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  c10::Event begin(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  torch::cuda::synchronize(device.index());
  MPI_Barrier(MPI_COMM_WORLD);
  begin.record(guard.getStream(device));
  for (int step = 0; step < steps; ++step) trainer.Step();
  end.record(guard.getStream(device));
  end.synchronize();
  return Slowest(begin.elapsedTime(end) / steps);
}

// Microseconds of the host until a step is under way, with nothing on the GPU before.
double OnHost(const torch::Device& device, int steps, Trainer& trainer) {
  double seconds = 0;
  for (int step = 0; step < steps; ++step) {
    torch::cuda::synchronize(device.index());
    MPI_Barrier(MPI_COMM_WORLD);
    const auto start = Clock::now();
    trainer.Step();
    seconds += Seconds(Clock::now() - start);
  }
  return Slowest(seconds * 1e6 / steps);
}

void MeasureSteps(const Work& work, const torch::Device& device, bool bfloat16,
                  const std::string& where) {
  Trainer ours(device, work.batch, work.side, bfloat16, true);
  Trainer bare(device, work.batch, work.side, bfloat16, false);
  const Pair pair = Interleave(
      work.rounds, [&] { return OnDevice(device, work.steps, ours); },
      [&] { return OnDevice(device, work.steps, bare); });
  if (rank() != 0) return;
  Emit(Row{"ResNet-50, batch " + std::to_string(work.batch) + ", " +
               (bfloat16 ? "bfloat16" : "float32") + where + ": step",
           size(), pair.ours, "ms", "bare step", pair.reference});
}

void MeasureHost(const Work& work, const torch::Device& device, const std::string& where) {
  Trainer ours(device, 2, 32, false, true);
  Trainer bare(device, 2, 32, false, false);
  const Pair pair = Interleave(
      work.rounds, [&] { return OnHost(device, work.steps, ours); },
      [&] { return OnHost(device, work.steps, bare); });
  if (rank() != 0) return;
  Emit(Row{"ResNet-50" + where + ": host time of a step", size(), pair.ours, "us", "bare step",
           pair.reference});
}

int Main(int argc, char** argv) {
  const std::string why = examples::why_no_gpu();
  if (!why.empty()) {
    std::fprintf(stderr, "%s\n", why.c_str());
    return kSkipped;
  }
  if (!Flag(argc, argv, "look", "").empty()) return 0;
  Work work;
  work.batch = std::stoll(Flag(argc, argv, "batch", "64"));
  work.side = std::stoll(Flag(argc, argv, "side", "224"));
  work.steps = std::stoi(Flag(argc, argv, "steps", "20"));
  work.rounds = std::stoi(Flag(argc, argv, "rounds", "5"));
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  const tests::OwnGpu own = tests::TakeGpu(static_cast<int>(torch::cuda::device_count()));
  init();
  {
    const std::string where = own.shared ? ", GPU shared" : "";
    const torch::Device device(torch::kCUDA, static_cast<c10::DeviceIndex>(own.number));
    const examples::CurrentDevice current(device);
    for (const std::string& what : ListFlag(argc, argv, "works", "float32,bfloat16,host")) {
      if (what == "float32" || what == "bfloat16") {
        MeasureSteps(work, device, what == "bfloat16", where);
      } else if (what != "host") {
        throw std::runtime_error("unknown work " + what +
                                 "; the works are float32, bfloat16 and host");
      } else if (size() > 1) {
        MeasureHost(work, device, where);
      }
    }
  }
  shutdown();
  MPI_Finalize();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("gpu_training", [&] { return Main(argc, argv); });
}
