// Trains a small convolutional net on handwritten digits, on as many ranks as are started:
//
//   train_digits                                  one process
//   sirtakirun -np 2 train_digits                 two ranks that learn together
//   sirtakirun -np 2 train_digits --device cuda   the same on GPUs
//
// The five steps that make a LibTorch program distributed are marked below.

#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "digits_data.h"
#include "digits_settings.h"
#include "flags.h"
#include "powersgd.h"
#include "progress.h"
#include "training.h"

namespace {

using digits::Digits;
using digits::kClasses;
using digits::kPixels;
using digits::Settings;

// ---- model ----

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("hidden", hidden);
    register_module("output", output);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(conv1(x));
    x = torch::max_pool2d(torch::relu(conv2(x)), 2);
    x = torch::relu(hidden(x.flatten(1)));
    return output(x);
  }

  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(1, 24, 3).padding(1)};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(24, 48, 3).padding(1)};
  torch::nn::Linear hidden{48 * kPixels / 4, 64};
  torch::nn::Linear output{64, kClasses};
};
TORCH_MODULE(Net);

// ---- training ----

template <class Base>
std::unique_ptr<torch::optim::Optimizer> distribute(Base&& base, const Net& net,
                                                    const Settings& settings,
                                                    examples::PowerSGD& powersgd) {
  auto options = sirtaki::DistributedOptimizerOptions().backward_passes_per_step(
      static_cast<int>(settings.accumulate));
  if (settings.compression == "f16") options.compression(sirtaki::Compression::F16);
  if (settings.compression == "bf16") options.compression(sirtaki::Compression::BF16);
  if (settings.powersgd > 0) options.hook(std::ref(powersgd));
  return std::make_unique<sirtaki::DistributedOptimizer<Base>>(std::move(base),
                                                               net->named_parameters(), options);
}

double learning_rate(const Settings& settings) {
  if (settings.lr != 0) return settings.lr;
  if (settings.optimizer == "sgd") return 0.02;
  if (settings.optimizer == "adagrad") return 0.01;
  return settings.optimizer == "rmsprop" ? 0.001 : 0.002;
}

// LBFGS is no choice here: it needs all samples in every step.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Net& net, const Settings& settings,
                                                        examples::PowerSGD& powersgd) {
  using namespace torch::optim;
  const double lr = learning_rate(settings);
  const auto parameters = net->parameters();
  if (settings.optimizer == "adam") {
    return distribute(Adam(parameters, AdamOptions(lr)), net, settings, powersgd);
  }
  if (settings.optimizer == "adamw") {
    return distribute(AdamW(parameters, AdamWOptions(lr)), net, settings, powersgd);
  }
  if (settings.optimizer == "rmsprop") {
    return distribute(RMSprop(parameters, RMSpropOptions(lr)), net, settings, powersgd);
  }
  if (settings.optimizer == "adagrad") {
    return distribute(Adagrad(parameters, AdagradOptions(lr)), net, settings, powersgd);
  }
  return distribute(SGD(parameters, SGDOptions(lr).momentum(0.9)), net, settings, powersgd);
}

// Each rank tests its share of the samples; every sample is tested once, so shares may be uneven.
double test_accuracy(Net& net, const Digits& test, const torch::Device& device) {
  torch::NoGradGuard no_grad;
  const std::size_t samples = *test.size();
  sirtaki::DistributedSampler sampler(
      samples, sirtaki::DistributedSamplerOptions().shuffle(false).uneven(sirtaki::Uneven::Keep));
  double right = 0;  // share of the right answers among this rank's
  double tested = 0;
  net->eval();
  if (const auto share = sampler.next(samples)) {
    tested = static_cast<double>(share->size());
    const auto rows = torch::tensor(std::vector<std::int64_t>(share->begin(), share->end()));
    const auto images = test.images().index_select(0, rows).to(device);
    const auto guesses = net(images).argmax(1).cpu();
    right =
        (guesses == test.classes().index_select(0, rows)).to(torch::kDouble).mean().item<double>();
  }
  net->train();
  return sirtaki::metric_average(right, tested, "test accuracy");
}

struct Plan {
  Digits train;
  Digits test;
  sirtaki::DistributedSampler sampler;  // this rank's share of the training data
  std::int64_t steps;                   // in an epoch
};

// Reads the data, and says what there is to do.
Plan make_plan(const Settings& settings) {
  auto [train, test] = digits::split(
      digits::read_samples(settings.data.empty() ? digits::find_data() : settings.data),
      settings.seed);
  // All ranks must make the same number of steps, so their shares must have one size.
  const auto uneven = settings.uneven == "pad" ? sirtaki::Uneven::Pad : sirtaki::Uneven::Drop;
  sirtaki::DistributedSampler sampler(*train.size(),
                                      sirtaki::DistributedSamplerOptions()
                                          .seed(static_cast<std::uint64_t>(settings.seed))
                                          .uneven(uneven));
  const auto samples = static_cast<std::int64_t>(sampler.size());
  const std::int64_t batches = (samples + settings.batch_size - 1) / settings.batch_size;
  const std::int64_t steps = batches / settings.accumulate;
  const int size = sirtaki::size();
  if (steps == 0 || *test.size() == 0) {
    throw std::runtime_error("too few samples for " + std::to_string(size) + " ranks");
  }
  if (sirtaki::rank() == 0) {
    std::printf("%zu training and %zu test samples; %d rank%s, batches of %lld each\n",
                *train.size(), *test.size(), size, size == 1 ? "" : "s",
                static_cast<long long>(settings.batch_size));
    std::fflush(stdout);
  }
  return {std::move(train), std::move(test), std::move(sampler), steps};
}

void report(const Net& net, double accuracy, double samples, double seconds) {
  sirtaki::check_parameters(*net);  // throws where a bit of them differs
  if (sirtaki::rank() != 0) return;
  std::printf("test accuracy: %.2f %%\n", 100 * accuracy);
  if (samples > 0) std::printf("speed: %.0f samples per second\n", samples / seconds);
  std::printf("parameters identical on all ranks, digest %016llx\n", examples::digest(*net));
  std::fflush(stdout);
}

void train(const Settings& settings) {
  // The model and each batch go to the GPU if there is one; nothing else is different.
  const torch::Device device = examples::choose_device(settings.device);
  const examples::CurrentDevice current(device);
  Plan plan = make_plan(settings);
  sirtaki::seed_all(static_cast<std::uint64_t>(settings.seed));
  Net net;
  net->to(device);

  // Step 2: more ranks make a larger batch, so the learning rate grows with the ranks.
  const double lr = learning_rate(settings);
  const double scaled_lr = lr * sirtaki::size();

  // Step 3: wrap the optimizer; its step() now averages the gradients of all ranks.
  const std::int64_t warmup_steps = std::min<std::int64_t>(2, settings.epochs) * plan.steps;
  examples::PowerSGD powersgd(settings.powersgd, warmup_steps,
                              static_cast<std::uint64_t>(settings.seed));
  const auto optimizer = make_optimizer(net, settings, powersgd);

  // Step 4: start from the same weights everywhere.
  sirtaki::broadcast_parameters(*net, /*root_rank=*/0);
  sirtaki::broadcast_optimizer_state(*optimizer, /*root_rank=*/0);

  examples::WarmupCosine scheduler(*optimizer, lr, scaled_lr, warmup_steps,
                                   (settings.epochs + 1) * plan.steps);

  std::int64_t epoch = 0;  // how many are done
  auto checkpoint =
      sirtaki::Checkpoint().model(*net).optimizer(*optimizer).sampler(plan.sampler).epoch(epoch);
  if (settings.powersgd > 0) checkpoint.object("powersgd", powersgd);
  const std::string file = settings.checkpoint.empty()
                               ? ""
                               : examples::checkpoint_file(settings.checkpoint, "digits.pt");
  if (settings.resume) examples::resume(file, checkpoint, epoch, scheduler, plan.steps);

  const std::int64_t first = epoch;
  const std::int64_t last = settings.stop_after == 0
                                ? settings.epochs
                                : std::min(settings.epochs, epoch + settings.stop_after);
  examples::Progress progress(settings.epochs);
  std::chrono::duration<double> training_time{0};
  double accuracy = epoch < last ? 0 : test_accuracy(net, plan.test, device);
  while (epoch < last) {
    // Step 5: each rank takes its share of the data, a different one in each epoch.
    plan.sampler.set_epoch(static_cast<std::size_t>(epoch));
    const auto loader = torch::data::make_data_loader(
        Digits(plan.train).map(torch::data::transforms::Stack<>()), plan.sampler,
        torch::data::DataLoaderOptions(static_cast<std::size_t>(settings.batch_size)));
    const auto start = std::chrono::steady_clock::now();
    double loss_sum = 0;
    std::int64_t batches = 0;
    optimizer->zero_grad();
    for (auto& batch : *loader) {
      const auto loss =
          torch::nn::functional::cross_entropy(net(batch.data.to(device)), batch.target.to(device));
      (loss / settings.accumulate).backward();
      loss_sum += loss.item<double>();
      if (++batches % settings.accumulate != 0) continue;
      optimizer->step();
      optimizer->zero_grad();
      scheduler.step();
      progress.step(epoch + 1, batches / settings.accumulate, plan.steps);
      if (batches == plan.steps * settings.accumulate) break;  // too few left for a whole step
    }
    training_time += std::chrono::steady_clock::now() - start;
    ++epoch;
    const double loss = sirtaki::metric_average(loss_sum / static_cast<double>(batches), "loss");
    accuracy = test_accuracy(net, plan.test, device);
    char result[64];
    std::snprintf(result, sizeof result, "loss %.4f, test accuracy %.2f %%", loss, 100 * accuracy);
    progress.epoch(epoch, result);
    if (!file.empty()) {
      powersgd.average_left_out();
      sirtaki::save_checkpoint(file, checkpoint);
    }
  }
  const auto samples = static_cast<double>((epoch - first) * sirtaki::size()) *
                       static_cast<double>(plan.sampler.size());
  report(net, accuracy, samples, training_time.count());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    // Step 1: join the ranks that sirtakirun or mpirun has started.
    sirtaki::init(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_digits: %s\n", error.what());
    return EXIT_FAILURE;
  }
  const int rank = sirtaki::rank();
  int exit_code = EXIT_SUCCESS;
  try {
    const Settings settings = digits::agreed_settings(argc, argv);
    if (!settings.help) {
      train(settings);
    } else if (rank == 0) {
      std::fputs(digits::kHelp, stdout);
    }
  } catch (const examples::UsageError& error) {
    if (rank == 0) std::fprintf(stderr, "train_digits: %s\n", error.what());
    exit_code = 2;
  } catch (const sirtaki::Error& error) {
    std::fprintf(stderr, "train_digits: rank %d: %s\n", rank, error.what());
    exit_code = EXIT_FAILURE;
  } catch (const std::exception& error) {
    // Perhaps only this rank knows of the error: the others must not wait for it.
    std::fprintf(stderr, "train_digits: rank %d: %s\n", rank, error.what());
    sirtaki::abort(error.what());
    exit_code = EXIT_FAILURE;
  }
  sirtaki::shutdown();
  return exit_code;
}
