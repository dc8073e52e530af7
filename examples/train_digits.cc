// Trains a small convolutional net on handwritten digits, on as many ranks as are started:
//
//   train_digits                                  one process
//   sirtakirun -np 2 train_digits                 two ranks that learn together
//   sirtakirun -np 2 train_digits --device cuda   the same on GPUs
//   sirtakirun --elastic -np 4 train_digits       goes on when ranks are lost or come
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
#include <optional>
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

sirtaki::DistributedSampler make_sampler(const Digits& data, const Settings& settings) {
  // All ranks must make the same number of steps, so their shares must have one size.
  const auto uneven = settings.uneven == "pad" ? sirtaki::Uneven::Pad : sirtaki::Uneven::Drop;
  return sirtaki::DistributedSampler(*data.size(),
                                     sirtaki::DistributedSamplerOptions()
                                         .seed(static_cast<std::uint64_t>(settings.seed))
                                         .uneven(uneven));
}

std::int64_t steps_of(std::size_t samples, const Settings& settings) {
  const std::int64_t batches =
      (static_cast<std::int64_t>(samples) + settings.batch_size - 1) / settings.batch_size;
  return batches / settings.accumulate;
}

// Reads the data, and says what there is to do.
Plan make_plan(const Settings& settings) {
  auto [train, test] = digits::split(
      digits::read_samples(settings.data.empty() ? digits::find_data() : settings.data),
      settings.seed);
  sirtaki::DistributedSampler sampler = make_sampler(train, settings);
  const std::int64_t steps = steps_of(sampler.size(), settings);
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

// A run, and how far it is.
struct Run {
  const Settings& settings;
  const torch::Device& device;
  Plan plan;
  Net net;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::optional<examples::WarmupCosine> scheduler;
  std::int64_t epoch = 0;  // how many are done
  double accuracy = 0;
};

std::int64_t warmup_steps(const Settings& settings, const Plan& plan) {
  return std::min<std::int64_t>(2, settings.epochs) * plan.steps;
}

void make_scheduler(Run& run) {
  // Step 2: more ranks make a larger batch, so the learning rate grows with the ranks.
  const double lr = learning_rate(run.settings);
  const double scaled_lr = lr * sirtaki::size();
  run.scheduler.emplace(*run.optimizer, lr, scaled_lr, warmup_steps(run.settings, run.plan),
                        (run.settings.epochs + 1) * run.plan.steps);
}

// Trains an epoch, or what is left of it, and returns the mean loss. Calls `after_step(step)`.
template <class AfterStep>
double train_epoch(Run& run, examples::Progress& progress, const AfterStep& after_step) {
  const Settings& settings = run.settings;
  // Step 5: each rank takes its share of the data, a different one in each epoch.
  run.plan.sampler.set_epoch(static_cast<std::size_t>(run.epoch));
  const auto loader = torch::data::make_data_loader(
      Digits(run.plan.train).map(torch::data::transforms::Stack<>()), run.plan.sampler,
      torch::data::DataLoaderOptions(static_cast<std::size_t>(settings.batch_size)));
  std::size_t position = run.plan.sampler.position();
  const std::int64_t steps = steps_of(run.plan.sampler.size() - position, settings);
  double loss_sum = 0;
  std::int64_t batches = 0;
  run.optimizer->zero_grad();
  for (auto& batch : *loader) {
    if (batches == steps * settings.accumulate) break;  // too few left for a whole step
    const auto loss = torch::nn::functional::cross_entropy(run.net(batch.data.to(run.device)),
                                                           batch.target.to(run.device));
    (loss / settings.accumulate).backward();
    loss_sum += loss.template item<double>();
    position += static_cast<std::size_t>(batch.data.size(0));
    if (++batches % settings.accumulate != 0) continue;
    run.optimizer->step();
    run.optimizer->zero_grad();
    run.scheduler->step();
    run.plan.sampler.set_position(position);
    progress.step(run.epoch + 1, batches / settings.accumulate, steps);
    after_step(batches / settings.accumulate);
  }
  const double mean = loss_sum / static_cast<double>(std::max<std::int64_t>(batches, 1));
  return sirtaki::metric_average(mean, "loss");
}

void finish_epoch(Run& run, double loss, examples::Progress& progress) {
  ++run.epoch;
  run.accuracy = test_accuracy(run.net, run.plan.test, run.device);
  char result[64];
  std::snprintf(result, sizeof result, "loss %.4f, test accuracy %.2f %%", loss,
                100 * run.accuracy);
  progress.epoch(run.epoch, result);
}

void train(Run& run, examples::PowerSGD& powersgd) {
  const Settings& settings = run.settings;
  // Step 4: start from the same weights everywhere.
  sirtaki::broadcast_parameters(*run.net, /*root_rank=*/0);
  sirtaki::broadcast_optimizer_state(*run.optimizer, /*root_rank=*/0);

  auto checkpoint = sirtaki::Checkpoint()
                        .model(*run.net)
                        .optimizer(*run.optimizer)
                        .sampler(run.plan.sampler)
                        .epoch(run.epoch);
  if (settings.powersgd > 0) checkpoint.object("powersgd", powersgd);
  const std::string file = settings.checkpoint.empty()
                               ? ""
                               : examples::checkpoint_file(settings.checkpoint, "digits.pt");
  if (settings.resume) {
    examples::resume(file, checkpoint, run.epoch, *run.scheduler, run.plan.steps);
  }

  const std::int64_t first = run.epoch;
  const std::int64_t last = settings.stop_after == 0
                                ? settings.epochs
                                : std::min(settings.epochs, run.epoch + settings.stop_after);
  examples::Progress progress(settings.epochs);
  std::chrono::duration<double> training_time{0};
  if (run.epoch >= last) run.accuracy = test_accuracy(run.net, run.plan.test, run.device);
  while (run.epoch < last) {
    const auto start = std::chrono::steady_clock::now();
    const double loss = train_epoch(run, progress, [](std::int64_t) {});
    training_time += std::chrono::steady_clock::now() - start;
    finish_epoch(run, loss, progress);
    if (!file.empty()) {
      powersgd.average_left_out();
      sirtaki::save_checkpoint(file, checkpoint);
    }
  }
  const std::int64_t of_epoch =
      std::min(static_cast<std::int64_t>(run.plan.sampler.size()),
               run.plan.steps * settings.accumulate * settings.batch_size);
  const auto samples = static_cast<double>((run.epoch - first) * sirtaki::size() * of_epoch);
  report(run.net, run.accuracy, samples, training_time.count());
}

// Trains in an elastic job. A rank may begin while the others train, and they do not make its
// collective calls: elastic::run() does what Step 4 does.
void train_elastic(Run& run) {
  constexpr std::int64_t kStepsOfCommit = 10;
  auto state = sirtaki::elastic::State()
                   .model(*run.net)
                   .optimizer(*run.optimizer)
                   .sampler(run.plan.sampler)
                   .value("epoch", run.epoch)
                   .value("accuracy", run.accuracy)
                   .on_change([&run] {
                     const auto sampler = make_sampler(run.plan.train, run.settings);
                     run.plan.steps = steps_of(sampler.size(), run.settings);
                   });
  sirtaki::elastic::run(state, [&] {
    examples::Progress progress(run.settings.epochs);
    while (run.epoch < run.settings.epochs) {
      // Other ranks make steps of another size, and another number of them.
      auto& sampler = run.plan.sampler;
      sampler.set_epoch(static_cast<std::size_t>(run.epoch));
      const std::int64_t left = steps_of(sampler.size() - sampler.position(), run.settings);
      make_scheduler(run);
      run.scheduler->go_to((run.epoch + 1) * run.plan.steps - left);
      const double loss = train_epoch(run, progress, [&](std::int64_t step) {
        state.step();
        if (step % kStepsOfCommit == 0) state.commit();
      });
      finish_epoch(run, loss, progress);
      state.commit();
    }
    report(run.net, run.accuracy, /*samples=*/0, /*seconds=*/0);
  });
}

void train(const Settings& settings) {
  // The model and each batch go to the GPU if there is one; nothing else is different.
  const torch::Device device = examples::choose_device(settings.device);
  const examples::CurrentDevice current(device);
  Plan plan = make_plan(settings);
  const auto seed = static_cast<std::uint64_t>(settings.seed);
  const bool elastic = sirtaki::elastic::is_elastic();
  if (elastic) {
    torch::manual_seed(seed);
  } else {
    sirtaki::seed_all(seed);
  }
  Net net;
  net->to(device);

  // Step 3: wrap the optimizer; its step() now averages the gradients of all ranks.
  examples::PowerSGD powersgd(settings.powersgd, warmup_steps(settings, plan), seed);
  auto optimizer = make_optimizer(net, settings, powersgd);
  Run run{settings, device, std::move(plan), net, std::move(optimizer), std::nullopt};
  make_scheduler(run);
  if (elastic) {
    train_elastic(run);
  } else {
    train(run, powersgd);
  }
}

// The settings of all ranks. A rank of an elastic job cannot ask the others, which train.
Settings read_settings(int argc, char** argv) {
  if (!sirtaki::elastic::is_elastic()) return digits::agreed_settings(argc, argv);
  const Settings settings = digits::parse_arguments(argc, argv);
  if (!settings.checkpoint.empty() || settings.powersgd > 0 || settings.stop_after > 0 ||
      settings.device != "cpu") {
    throw examples::UsageError(
        "an elastic job takes no --checkpoint, --powersgd, --stop-after, and no --device but cpu");
  }
  return settings;
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
    const Settings settings = read_settings(argc, argv);
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
    if (sirtaki::is_initialized()) sirtaki::abort(error.what());
    exit_code = EXIT_FAILURE;
  }
  sirtaki::shutdown();
  return exit_code;
}
