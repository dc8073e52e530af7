// Steps of the MLP of training.cc as a pipeline, a batch as micro-batches, against each rank's stage
// with nothing sent and against one rank that has all of it and accumulates; all in turn in one run. A
// pipeline of p ranks takes at least (m + p - 1) / m times as long as its stages with nothing sent.
//
//   mpirun -np 2 --bind-to none pipelining [--batch N] [--micro-batches M] [--rounds R]
//   mpirun -np 2 --bind-to none pipelining --peak 1f1b|gpipe [--batch N] [--micro-batches M]
//   mpirun -np 2 --bind-to none pipelining --draw SCHEDULE [--batch N] [--micro-batches M]
//
// The second form tells the peak of what a batch takes on each rank besides parameters and their
// gradients: one schedule in each run, since a peak stays. The third makes eight batches for a timeline
// (SIRTAKI_TIMELINE), with eight layers, so that four stages are equal as well.
#include <mpi.h>
#include <sirtaki/torch.h>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/loss.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/support/measure.h"
#include "benchmarks/support/models.h"
#include "benchmarks/support/ranks.h"

namespace sirtaki::benchmarks {
namespace {

struct PipelineWork {
  std::int64_t batch = 64;
  int micro_batches = 8;
  at::Tensor inputs;
  at::Tensor targets;
};

constexpr double kRate = 0.01;

class PipelineStep {
 public:
  PipelineStep(const PipelineWork& work, const std::string& schedule, int layers = 6)
      : work_(work),
        pipeline_(MakeMlp(layers), torch::nn::MSELoss(),
                  PipelineOptions()
                      .micro_batches(work.micro_batches)
                      .schedule(schedule)
                      .stages_per_rank(schedule == "interleaved_1f1b" ? 2 : 1)),
        optimizer_(pipeline_.parameters(), torch::optim::SGDOptions(kRate)) {}
  void Run() {
    optimizer_.zero_grad();
    pipeline_.train_batch(work_.inputs, work_.targets);
    optimizer_.step();
  }
  double bubble() const { return pipeline_.report().bubble; }

 private:
  const PipelineWork& work_;
  Pipeline pipeline_;
  torch::optim::SGD optimizer_;
};

// An UnsentStep runs layers of the model, with nothing sent.
class UnsentStep {
 public:
  // One of `parts` equal parts of the model.
  UnsentStep(const PipelineWork& work, int part, int parts) : work_(work), is_first_(part == 0) {
    torch::nn::Sequential model = MakeMlp();
    const auto count = model->size() / static_cast<std::size_t>(parts);
    for (std::size_t i = 0; i < count; ++i) {
      layers_->push_back(*(model->begin() + static_cast<std::ptrdiff_t>(
                                                static_cast<std::size_t>(part) * count + i)));
    }
    optimizer_ =
        std::make_unique<torch::optim::SGD>(layers_->parameters(), torch::optim::SGDOptions(kRate));
  }
  void Run() {
    optimizer_->zero_grad();
    const auto inputs = work_.inputs.chunk(work_.micro_batches);
    const auto targets = work_.targets.chunk(work_.micro_batches);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      // A later stage makes gradients for the one before it.
      at::Tensor input = inputs[i].detach();
      if (!is_first_) input = input.clone().requires_grad_(true);
      (at::mse_loss(layers_->forward(input), targets[i]) / work_.micro_batches).backward();
    }
    optimizer_->step();
  }

 private:
  const PipelineWork& work_;
  const bool is_first_;
  torch::nn::Sequential layers_;
  std::unique_ptr<torch::optim::SGD> optimizer_;
};

void TellPeak(const PipelineWork& work, const std::string& schedule) {
  PipelineStep step(work, schedule);
  step.Run();
  const std::int64_t kept = memory_use().in_use_bytes;  // parameters and gradients
  step.Run();
  const double peak = static_cast<double>(memory_use().peak_bytes - kept) / (1 << 20);
  for (int of = 0; of < size(); ++of) {
    const auto it = broadcast(at::full({1}, peak, at::kDouble), of);
    if (rank() != 0) continue;
    Emit(Sample{"peak of a batch of " + std::to_string(work.micro_batches) +
                    " micro-batches, rank " + std::to_string(of),
                size(), schedule == "1f1b" ? kOurs : schedule, it.item<double>(), "MiB"});
  }
}

void TellTimes(const PipelineWork& work, int rounds) {
  PipelineStep ours(work, "1f1b");
  PipelineStep gpipe(work, "gpipe");
  UnsentStep unsent(work, rank(), size());
  UnsentStep alone(work, 0, 1);
  const auto timed = [](auto& step) { return [&step] { return Timed([&] { step.Run(); }); }; };
  const std::vector<double> times = Interleave(
      rounds,
      {{kOurs, timed(ours)},
       {"gpipe", timed(gpipe)},
       {"unsent", timed(unsent)},
       {"one rank alone", [&] { return Timed([&] { rank() == 0 ? alone.Run() : void(); }); }}});
  if (rank() != 0) return;
  const char* const names[] = {kOurs, "gpipe", "unsent", "one rank alone"};
  for (std::size_t i = 0; i < times.size(); ++i) {
    Emit(Sample{"step", size(), names[i], times[i] * 1e3, "ms"});
  }
  Emit(Sample{"step", size(), "limit", times[2] / (1 - ours.bubble()) * 1e3, "ms"});
}

int Main(int argc, char** argv) {
  PipelineWork work;
  work.batch = std::stoll(Flag(argc, argv, "batch", "64"));
  work.micro_batches = std::stoi(Flag(argc, argv, "micro-batches", "8"));
  const std::string peak = Flag(argc, argv, "peak", "");
  const std::string draw = Flag(argc, argv, "draw", "");
  init();
  const MpiOfReferences mpi;
  at::set_num_threads(1);
  at::manual_seed(0);
  work.inputs = at::randn({work.batch, 2048});
  work.targets = at::randn({work.batch, 2048});
  if (!draw.empty()) {
    PipelineStep step(work, draw, /*layers=*/8);
    for (int i = 0; i < 8; ++i) step.Run();
  } else if (peak.empty()) {
    TellTimes(work, std::stoi(Flag(argc, argv, "rounds", "11")));
  } else {
    TellPeak(work, peak);
  }
  shutdown();
  mpi.End();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("pipelining", [&] { return Main(argc, argv); });
}
