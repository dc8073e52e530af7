// Trains a ResNet-50 on images, on CPUs or GPUs, on as many ranks as sirtakirun starts:
//
//   sirtakirun -np 8 train_resnet --data train --validation val --dtype bfloat16
//   sirtakirun -np 2 train_resnet --model resnet18 --image-size 64 --batch-size 8 --steps 10
//
// Without --data the images are synthetic. Comments that begin with "GPU:" mark what a GPU needs;
// the rest is as in train_digits.cc.

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
#include "flags.h"
#include "progress.h"
#include "resnet.h"
#include "resnet_data.h"
#include "resnet_settings.h"
#include "training.h"

namespace {

using resnet::Batches;
using resnet::FolderSource;
using resnet::ResNet;
using resnet::Settings;
using resnet::Source;

// ---- data ----

struct Data {
  std::shared_ptr<const Source> train;
  std::shared_ptr<const Source> validation;  // null: there is none
};

// All ranks must have the same images: in later epochs a rank reads those that others read before.
void check_alike(const FolderSource& source, const std::string& flag) {
  const std::string here =
      std::to_string(source.size()) + " images of " + std::to_string(source.classes()) + " classes";
  std::string names = here;
  for (const std::string& name : source.class_names()) names += "\n" + name;
  const std::string files = source.names();
  names += "\n" + std::to_string(examples::digest(files.data(), files.size()));
  const std::vector<std::string> all = sirtaki::allgather_object(names, flag);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto first_line = [](const std::string& text) { return text.substr(0, text.find('\n')); };
    throw examples::UsageError(
        "the ranks have different images in " + flag + ": " + first_line(all[0]) + " on rank 0, " +
        first_line(all[rank]) +
        (first_line(all[0]) == first_line(all[rank]) ? " of other names" : "") + " on rank " +
        std::to_string(rank));
  }
}

Data open_data(const Settings& settings) {
  if (settings.data.empty()) {
    return {
        std::make_shared<resnet::SyntheticSource>(settings.images, settings.classes, settings.seed),
        nullptr};
  }
  const auto train = std::make_shared<FolderSource>(settings.data);
  check_alike(*train, "--data");
  if (settings.validation.empty()) return {train, nullptr};
  const auto validation = std::make_shared<FolderSource>(settings.validation);
  check_alike(*validation, "--validation");
  if (validation->class_names() != train->class_names()) {
    throw examples::UsageError(
        "--validation has other classes than --data: " + std::to_string(validation->classes()) +
        " and " + std::to_string(train->classes()));
  }
  return {train, validation};
}

template <class Sampler>
auto make_loader(const std::shared_ptr<const Source>& source, const Batches::Options& options,
                 const Sampler& sampler, const Settings& settings) {
  return torch::data::make_data_loader(
      Batches(source, options), sampler,
      torch::data::DataLoaderOptions(static_cast<std::size_t>(settings.batch_size))
          .workers(static_cast<std::size_t>(settings.workers))
          .drop_last(options.training));
}

// ---- the model on its device ----

// Sums of the losses and right answers of a pass over images. They stay on the model's device: if
// the host looked at them after each step, it would wait for the GPU.
class Results {
 public:
  explicit Results(const torch::Device& device) : sums_(torch::zeros({2}, device)) {}

  void add(const torch::Tensor& loss, const torch::Tensor& logits, const torch::Tensor& targets) {
    torch::NoGradGuard no_grad;
    const auto count = static_cast<double>(targets.size(0));
    const torch::Tensor right = (logits.argmax(1) == targets).sum();
    sums_ += torch::stack({loss.detach() * count, right.to(torch::kFloat)});
    images_ += count;
  }

  // The means over all ranks.
  std::pair<double, double> loss_and_accuracy() const {
    const torch::Tensor sums = sums_.cpu() / std::max(images_, 1.0);
    return {sirtaki::metric_average(sums[0].item<double>(), images_, "loss"),
            sirtaki::metric_average(sums[1].item<double>(), images_, "accuracy")};
  }
  double images() const { return images_; }

 private:
  torch::Tensor sums_;
  double images_ = 0;
};

struct Trainer {
  ResNet net;
  torch::Device device;
  bool bfloat16;

  torch::Tensor forward(const torch::Tensor& images) {
    const examples::Autocast autocast(device, bfloat16);
    return net(images).to(torch::kFloat);
  }
  // GPU: the batch lies in pinned memory, so the host goes on while it is copied.
  torch::Tensor here(const torch::Tensor& tensor) const { return tensor.to(device, true); }
};

// Each rank has its own running statistics of batch normalisation until this call.
void average_statistics(ResNet& net) {
  torch::NoGradGuard no_grad;
  for (const auto& buffer : net->named_buffers()) {
    torch::Tensor values = buffer.value();
    if (values.is_floating_point()) {
      values.copy_(sirtaki::metric_average(values, buffer.key()));
    }
  }
}

// Each rank tests its share of the images.
double test_accuracy(Trainer& trainer, const std::shared_ptr<const Source>& source,
                     const Settings& settings) {
  torch::NoGradGuard no_grad;
  trainer.net->eval();
  const sirtaki::DistributedSampler sampler(
      source->size(),
      sirtaki::DistributedSamplerOptions().shuffle(false).uneven(sirtaki::Uneven::Keep));
  Batches::Options options;
  options.side = static_cast<int>(settings.image_size);
  options.pinned = trainer.device.is_cuda();
  Results results(trainer.device);
  const auto loader = make_loader(source, options, sampler, settings);
  for (auto& batch : *loader) {
    const torch::Tensor targets = trainer.here(batch.target);
    const torch::Tensor logits = trainer.forward(trainer.here(batch.data));
    results.add(torch::nn::functional::cross_entropy(logits, targets), logits, targets);
  }
  trainer.net->train();
  return results.loss_and_accuracy().second;
}

// ---- training ----

// A rank's steps in an epoch.
std::int64_t count_steps(const Data& data, const sirtaki::DistributedSampler& sampler,
                         const Settings& settings, const torch::Device& device) {
  const auto steps = static_cast<std::int64_t>(sampler.size()) / settings.batch_size;
  const int size = sirtaki::size();
  if (steps == 0) {
    throw examples::UsageError(
        std::to_string(data.train->size()) + " images are too few for a batch of " +
        std::to_string(settings.batch_size) + " on each of " + std::to_string(size) + " ranks");
  }
  if (sirtaki::rank() == 0) {
    std::printf("%s, %s, on %s; %zu images of %lld classes; %d rank%s, batches of %lld each\n",
                settings.model.c_str(), settings.dtype.c_str(), device.str().c_str(),
                data.train->size(), static_cast<long long>(data.train->classes()), size,
                size == 1 ? "" : "s", static_cast<long long>(settings.batch_size));
    std::fflush(stdout);
  }
  return settings.steps == 0 ? steps : std::min(steps, settings.steps);
}

void report(const ResNet& net, double images, double seconds) {
  sirtaki::check_parameters(*net);
  if (sirtaki::rank() != 0) return;
  if (images > 0) std::printf("speed: %.1f images per second over all ranks\n", images / seconds);
  std::printf("parameters identical on all ranks, digest %016llx\n", examples::digest(*net));
  std::fflush(stdout);
}

std::string text_of_epoch(double loss, double accuracy, double images_per_second,
                          std::optional<double> tested) {
  char text[160];
  const int length = std::snprintf(text, sizeof text, "loss %.4f, accuracy %.2f %%, %.1f images/s",
                                   loss, 100 * accuracy, images_per_second);
  if (tested) {
    std::snprintf(text + length, sizeof text - static_cast<std::size_t>(length),
                  ", test accuracy %.2f %%", 100 * *tested);
  }
  return text;
}

void train(const Settings& settings) {
  // GPU: each rank has one, which is the current device from here on.
  const torch::Device device = examples::choose_device(settings.device);
  const examples::CurrentDevice current(device);

  const Data data = open_data(settings);
  sirtaki::DistributedSampler sampler(data.train->size(),
                                      sirtaki::DistributedSamplerOptions()
                                          .seed(static_cast<std::uint64_t>(settings.seed))
                                          .uneven(sirtaki::Uneven::Drop));
  const std::int64_t steps = count_steps(data, sampler, settings, device);
  sirtaki::seed_all(static_cast<std::uint64_t>(settings.seed));
  Trainer trainer{ResNet(settings.model == "resnet50" ? 50 : 18, data.train->classes()), device,
                  settings.dtype == "bfloat16"};
  // GPU: the model goes there before the optimizer is made, which holds its parameters.
  trainer.net->to(device);

  const double one_rank = settings.lr * static_cast<double>(settings.batch_size) / 256;
  const double all_ranks = one_rank * sirtaki::size();
  auto optimizer = sirtaki::DistributedOptimizer(
      torch::optim::SGD(trainer.net->parameters(),
                        torch::optim::SGDOptions(one_rank).momentum(0.9).weight_decay(1e-4)),
      trainer.net->named_parameters());
  sirtaki::broadcast_parameters(*trainer.net, /*root_rank=*/0);
  sirtaki::broadcast_optimizer_state(optimizer, /*root_rank=*/0);
  examples::WarmupCosine scheduler(optimizer, one_rank, all_ranks,
                                   std::min(settings.warmup * steps, settings.epochs * steps / 5),
                                   (settings.epochs + 1) * steps);

  std::int64_t epoch = 0;  // how many are done
  const auto checkpoint =
      sirtaki::Checkpoint().model(*trainer.net).optimizer(optimizer).sampler(sampler).epoch(epoch);
  const std::string file = settings.checkpoint.empty()
                               ? ""
                               : examples::checkpoint_file(settings.checkpoint, "resnet.pt");
  if (settings.resume) examples::resume(file, checkpoint, epoch, scheduler, steps);

  const std::int64_t last = settings.stop_after == 0
                                ? settings.epochs
                                : std::min(settings.epochs, epoch + settings.stop_after);
  examples::Progress progress(settings.epochs);
  double all_images = 0;
  std::chrono::duration<double> all_time{0};
  while (epoch < last) {
    sampler.set_epoch(static_cast<std::size_t>(epoch));
    const auto loader = make_loader(data.train,
                                    {static_cast<int>(settings.image_size), /*training=*/true,
                                     settings.seed, epoch, device.is_cuda()},
                                    sampler, settings);
    const auto start = std::chrono::steady_clock::now();
    Results results(device);
    std::int64_t step = 0;
    for (auto& batch : *loader) {
      const torch::Tensor targets = trainer.here(batch.target);
      optimizer.zero_grad();
      const torch::Tensor logits = trainer.forward(trainer.here(batch.data));
      const torch::Tensor loss = torch::nn::functional::cross_entropy(logits, targets);
      loss.backward();
      optimizer.step();
      scheduler.step();
      results.add(loss, logits, targets);
      progress.step(epoch + 1, ++step, steps);
      if (step == steps) break;
    }
    const auto [loss, accuracy] = results.loss_and_accuracy();  // waits for the device
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    const double images = results.images() * sirtaki::size();
    all_images += images;
    all_time += time;
    ++epoch;
    average_statistics(trainer.net);
    std::optional<double> tested;
    if (data.validation != nullptr) tested = test_accuracy(trainer, data.validation, settings);
    progress.epoch(epoch, text_of_epoch(loss, accuracy, images / time.count(), tested));
    if (!file.empty()) sirtaki::save_checkpoint(file, checkpoint);
  }
  report(trainer.net, all_images, all_time.count());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    sirtaki::init(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_resnet: %s\n", error.what());
    return EXIT_FAILURE;
  }
  const int rank = sirtaki::rank();
  int exit_code = EXIT_SUCCESS;
  try {
    const Settings settings =
        examples::agreed([&] { return resnet::parse_arguments(argc, argv); }, resnet::describe);
    if (!settings.help) {
      train(settings);
    } else if (rank == 0) {
      resnet::print_help();
    }
  } catch (const examples::UsageError& error) {
    if (rank == 0) std::fprintf(stderr, "train_resnet: %s\n", error.what());
    exit_code = 2;
  } catch (const sirtaki::Error& error) {
    std::fprintf(stderr, "train_resnet: rank %d: %s\n", rank, error.what());
    exit_code = EXIT_FAILURE;
  } catch (const std::exception& error) {
    // Perhaps only this rank knows of the error: the others must not wait for it.
    std::fprintf(stderr, "train_resnet: rank %d: %s\n", rank, error.what());
    if (sirtaki::is_initialized()) sirtaki::abort(error.what());
    exit_code = EXIT_FAILURE;
  }
  sirtaki::shutdown();
  return exit_code;
}
