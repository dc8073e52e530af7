// Steps of training, of one variant: which allocator a process has is decided when it starts, so
// the driver starts the variants in turn.
//
//   mpirun -np 2 --bind-to none training VARIANT --model mlp|resnet18 --batch N [--steps N]
//
//   ours              DistributedOptimizer
//   in-step           the same, with average_at(Average::Step)
//   adam              ours with Adam in place of SGD
//   adam-fused        the same, with the option fused
//   adam-sharded      adam with Shard::OptimizerState
//   adam-gradients    adam with Shard::Gradients
//   adam-sharded-fused, adam-gradients-fused  both
//   …-copies          of a sharded one: without share_parameters
//   …-over-host       of a sharded one: with ShardOver::Host
//   no-communication  the ranks side by side, with the same allocator; on one rank: one rank alone
//   loop              plain LibTorch; one MPI_Allreduce per parameter after backward
//   plain             plain LibTorch; nothing of Sirtaki or MPI is started
#include <mpi.h>
#include <sirtaki/torch.h>

#include <ATen/Parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/support/measure.h"
#include "benchmarks/support/models.h"

namespace sirtaki::benchmarks {
namespace {

struct Work {
  std::string model;
  std::int64_t batch = 8;
  int steps = 10;
  int warm_up = 4;
};

// What the literature calls a step: forward, backward, reduction, update.
class Trainer {
 public:
  explicit Trainer(const Work& work) {
    at::manual_seed(0);
    const bool mlp = work.model == "mlp";
    model_ = mlp ? MakeMlp() : MakeResNet18();
    inputs_ = mlp ? at::randn({work.batch, 2048}) : at::randn({work.batch, 3, 112, 112});
    targets_ = at::randint(mlp ? 2048 : 1000, {work.batch}, at::kLong);
  }

  torch::nn::Sequential& model() { return model_; }

  template <class Optimizer, class Reduce>
  void Step(Optimizer& optimizer, const Reduce& reduce) {
    optimizer.zero_grad();
    torch::nn::functional::cross_entropy(model_->forward(inputs_), targets_).backward();
    reduce();
    optimizer.step();
  }

 private:
  torch::nn::Sequential model_{nullptr};
  at::Tensor inputs_;
  at::Tensor targets_;
};

template <class Optimizer, class Reduce>
std::vector<double> Train(const Work& work, Trainer& trainer, Optimizer& optimizer,
                          const Reduce& reduce) {
  std::vector<double> times;
  for (int step = 0; step < work.warm_up + work.steps; ++step) {
    const auto start = Clock::now();
    trainer.Step(optimizer, reduce);
    if (step >= work.warm_up) times.push_back(Seconds(Clock::now() - start));
  }
  return times;
}

// The loop that a program without a library writes.
void AverageEach(const std::vector<at::Tensor>& parameters, int ranks) {
  for (const at::Tensor& parameter : parameters) {
    at::Tensor gradient = parameter.grad();
    MPI_Allreduce(MPI_IN_PLACE, gradient.data_ptr(), static_cast<int>(gradient.numel()), MPI_FLOAT,
                  MPI_SUM, MPI_COMM_WORLD);
    gradient.div_(ranks);
  }
}

std::vector<double> Run(const std::string& variant, const Work& work, int ranks) {
  at::set_num_threads(1);
  Trainer trainer(work);
  torch::optim::SGD sgd(trainer.model()->parameters(), torch::optim::SGDOptions(0.01));
  if (variant == "ours" || variant == "in-step") {
    const Average average = variant == "ours" ? Average::Backward : Average::Step;
    auto optimizer = DistributedOptimizer(std::move(sgd), trainer.model()->named_parameters(),
                                          DistributedOptimizerOptions().average_at(average));
    broadcast_parameters(*trainer.model(), 0);
    return Train(work, trainer, optimizer, [] {});
  }
  if (variant.rfind("adam", 0) == 0) {
    torch::optim::Adam adam(trainer.model()->parameters(), torch::optim::AdamOptions(1e-4));
    const auto has = [&](const char* word) { return variant.find(word) != std::string::npos; };
    auto optimizer =
        DistributedOptimizer(std::move(adam), trainer.model()->named_parameters(),
                             DistributedOptimizerOptions()
                                 .shard(has("gradients") ? Shard::Gradients
                                        : has("sharded") ? Shard::OptimizerState
                                                         : Shard::None)
                                 .shard_over(has("over-host") ? ShardOver::Host : ShardOver::All)
                                 .share_parameters(!has("copies"))
                                 .fused(has("fused")));
    broadcast_parameters(*trainer.model(), 0);
    return Train(work, trainer, optimizer, [] {});
  }
  const std::vector<at::Tensor> parameters = trainer.model()->parameters();
  if (variant == "loop") {
    return Train(work, trainer, sgd, [&] { AverageEach(parameters, ranks); });
  }
  return Train(work, trainer, sgd, [] {});
}

// Each step's time on the slowest rank. Memory is the driver's to measure: it sees all ranks.
void Report(const std::string& variant, std::vector<double> times) {
  int started = 0;
  MPI_Initialized(&started);
  int rank = 0;
  int ranks = 1;
  if (started != 0) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Allreduce(MPI_IN_PLACE, times.data(), static_cast<int>(times.size()), MPI_DOUBLE, MPI_MAX,
                  MPI_COMM_WORLD);
  }
  if (rank != 0) return;
  Emit(Sample{"step", ranks, variant, Median(std::move(times)) * 1e3, "ms"});
}

int Main(int argc, char** argv) {
  if (argc < 2) throw std::invalid_argument("which variant?");
  const std::string variant = argv[1];
  Work work;
  work.model = Flag(argc, argv, "model", "mlp");
  work.batch = std::stoll(Flag(argc, argv, "batch", "8"));
  work.steps = std::stoi(Flag(argc, argv, "steps", "10"));
  int ranks = 1;
  const bool with_init = variant.rfind("adam", 0) == 0 || variant == "ours" ||
                         variant == "in-step" || variant == "no-communication";
  if (with_init) {
    init();
    ranks = size();
  } else if (variant == "loop") {
    MPI_Init(&argc, &argv);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  } else if (variant != "plain") {
    throw std::invalid_argument("no such variant: " + variant);
  }
  Report(variant, Run(variant, work, ranks));
  shutdown();
  if (variant == "loop") MPI_Finalize();
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("training", [&] { return Main(argc, argv); });
}
