// Trains a small net in an elastic job, until a file says that it is enough: elastic_program.py by the C++
// API. elastic_job.py starts it, and ends some of its processes.
#include <sirtaki/torch.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cinttypes>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr std::int64_t kSamples = 60;
constexpr std::size_t kBatch = 2;
constexpr auto kPause =
    std::chrono::milliseconds(10);  // between steps: some are left when a change comes
constexpr std::int64_t kMostRanks = 4;
constexpr std::int64_t kStepsOfCommit = 10;  // where step() is called after each

struct Net : torch::nn::Module {
  Net() {
    register_module("hidden", hidden);
    register_module("norm", norm);
    register_module("output", output);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    // Several values per channel, in a batch of one sample too.
    return output(norm(hidden(x).view({-1, 2, 4})).view({-1, 8}));
  }

  torch::nn::Linear hidden{6, 8};
  torch::nn::BatchNorm1d norm{2};
  torch::nn::Linear output{8, 1};
};

std::uint64_t digest(const torch::nn::Module& module) {
  std::uint64_t hash = 14695981039346656037U;  // FNV-1a
  for (const auto& parameter : module.parameters()) {
    const auto values = parameter.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(values.const_data_ptr());
    for (std::size_t i = 0; i < values.nbytes(); ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
  }
  return hash;
}

// Every sample of the epoch was trained; those that are there twice filled up the shares, fewer than
// ranks each time that they were dealt out.
void check(const torch::Tensor& trained, std::int64_t dealt) {
  const auto missing = (trained == 0).sum().item<std::int64_t>();
  const auto twice = trained.sum().item<std::int64_t>() - kSamples;
  if (missing == 0 && twice <= (kMostRanks - 1) * dealt) return;
  throw std::runtime_error(std::to_string(missing) + " samples were not trained, " +
                           std::to_string(twice) + " twice");
}

void train(const std::string& enough, const std::string& mode) {
  torch::manual_seed(
      static_cast<std::uint64_t>(sirtaki::rank()));  // only run() makes the nets equal
  Net net;
  auto optimizer = sirtaki::DistributedOptimizer(
      torch::optim::SGD(net.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)),
      net.named_parameters());
  const auto inputs = torch::sin(torch::arange(kSamples * 6, torch::kFloat) * 1.7F).view({-1, 6});
  const auto targets = inputs.sum(1, /*keepdim=*/true);
  sirtaki::DistributedSampler sampler(kSamples);
  std::int64_t epoch = 0;
  std::int64_t steps = 0;
  std::int64_t dealt = 0;                                 // the samples, in this epoch
  auto trained = torch::zeros({kSamples}, torch::kLong);  // how often, in this epoch
  auto state = sirtaki::elastic::State()
                   .model(net)
                   .optimizer(optimizer)
                   .sampler(sampler)
                   .value("epoch", epoch)
                   .value("steps", steps)
                   .value("dealt", dealt)
                   .value("trained", trained);

  if (mode == "lost before run" && sirtaki::rank() == 1) std::raise(SIGKILL);

  const auto is_enough = [&] {
    return sirtaki::broadcast_object(std::filesystem::exists(enough) ? "yes" : "no", 0) == "yes";
  };
  const auto run = [&] {
    if (mode == "fails") throw sirtaki::Error(sirtaki::ErrorCode::Backend, "on purpose");
    std::printf("begins %d %d %" PRId64 " %" PRId64 " %016" PRIx64 "\n", sirtaki::rank(),
                sirtaki::size(), epoch, steps, digest(net));
    while (!is_enough()) {
      ++dealt;
      while (const auto batch = sampler.next(kBatch)) {
        const auto ours = torch::tensor(std::vector<std::int64_t>(batch->begin(), batch->end()));
        const auto all = sirtaki::allgather(ours);
        optimizer.zero_grad();
        torch::mse_loss(net.forward(inputs.index_select(0, ours)), targets.index_select(0, ours))
            .backward();
        optimizer.step();
        trained.index_add_(0, all, torch::ones_like(all));
        ++steps;
        std::this_thread::sleep_for(kPause);
        if (mode == "steps") state.step();
        if (mode != "steps" || steps % kStepsOfCommit == 0) state.commit();
      }
      check(trained, dealt);
      ++epoch;
      dealt = 0;
      trained.zero_();
      sampler.set_epoch(static_cast<std::size_t>(epoch));
      state.commit();
      if (sirtaki::rank() == 0) std::printf("epoch %" PRId64 " %d\n", epoch, sirtaki::size());
    }
  };
  sirtaki::elastic::run(state, run);
  try {
    sirtaki::elastic::run(state, run);
  } catch (const sirtaki::Error& error) {
    std::printf("again: %s\n", error.what());
  }
  std::printf("ends %d %d %" PRId64 " %016" PRIx64 "\n", sirtaki::rank(), sirtaki::size(), steps,
              digest(net));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: elastic_twin FILE [MODE]\n");
    return EXIT_FAILURE;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  std::printf("pid %d\n", static_cast<int>(getpid()));
  try {
    sirtaki::init();
    train(argv[1], argc == 3 ? argv[2] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "elastic_twin: %s\n", error.what());
    if (sirtaki::is_initialized()) sirtaki::abort(error.what());
    return EXIT_FAILURE;
  }
  sirtaki::shutdown();
  return EXIT_SUCCESS;
}
