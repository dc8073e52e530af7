// Trains a small GPT, letter by letter, on as many ranks as sirtakirun starts:
//
//   sirtakirun -np 2 train_transformer
//   sirtakirun -np 2 train_transformer --shard optimizer   AdamW's state once, not on each rank
//   sirtakirun -np 2 train_transformer --recompute         memory for activations of one block
//   sirtakirun -np 4 train_transformer --tensor-parallel 2 each layer on two ranks, and two of those
//   sirtakirun -np 4 train_transformer --tensor-parallel 2 --pipeline 2
//                                                          two stages, each layer on two ranks
//
// What makes the program distributed is explained in train_digits.cc.

#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device.h"
#include "flags.h"
#include "progress.h"
#include "training.h"
#include "transformer.h"
#include "transformer_pipeline.h"
#include "transformer_settings.h"
#include "transformer_text.h"

namespace {

using transformer::Gpt;
using transformer::inputs_of;
using transformer::loss_of;
using transformer::Settings;
using transformer::targets_of;

constexpr std::int64_t kLetters = 200000;  // of the text

// ---- data ----

// A window is `context` letters and the one after them, which begins the next window.
torch::Tensor windows_of(const torch::Tensor& text, std::int64_t context) {
  return text.unfold(0, context + 1, context);
}

// The next windows of this rank's share; undefined at its end.
torch::Tensor next_batch(const torch::Tensor& windows, sirtaki::DistributedSampler& sampler,
                         std::int64_t count) {
  const auto share = sampler.next(static_cast<std::size_t>(count));
  if (!share) return {};
  const std::vector<std::int64_t> rows(share->begin(), share->end());
  return windows.index_select(0, torch::tensor(rows).to(windows.device()));
}

// What a guess costs that knows how often each letter comes, and nothing else.
double unigram_entropy(const torch::Tensor& text) {
  const torch::Tensor counts = torch::bincount(text).to(torch::kDouble);
  const torch::Tensor shares = counts.index({counts > 0}) / counts.sum();
  return -(shares * shares.log()).sum().item<double>();
}

// ---- training ----

// AdamW pulls matrices towards zero, and leaves biases and norms alone.
torch::optim::AdamW make_adamw(const torch::nn::Module& net, double lr) {
  std::vector<torch::Tensor> matrices, vectors;
  for (const auto& parameter : net.parameters()) {
    (parameter.dim() == 2 ? matrices : vectors).push_back(parameter);
  }
  const auto options = torch::optim::AdamWOptions(lr).betas({0.9, 0.95});
  const auto group = [&](std::vector<torch::Tensor> parameters, double weight_decay) {
    auto own = std::make_unique<torch::optim::AdamWOptions>(options);
    own->weight_decay(weight_decay);
    return torch::optim::OptimizerParamGroup(std::move(parameters), std::move(own));
  };
  return torch::optim::AdamW({group(std::move(matrices), 0.1), group(std::move(vectors), 0)},
                             options);
}

// The share of the windows of this rank, and of those that have other parts of the same layers.
sirtaki::DistributedSamplerOptions share_of(const sirtaki::Mesh& mesh) {
  return sirtaki::DistributedSamplerOptions()
      .rank(mesh.coordinate("data"))
      .ranks(mesh.size("data"));
}

// A Model is the net, whole or as a pipeline.
struct Model {
  Model(const Settings& settings, const sirtaki::Mesh& mesh, const torch::Device& device)
      : gpt(settings, mesh.set("tensor")) {
    gpt->to(device);
    if (settings.pipeline == 1) return;
    pipeline = transformer::pipeline_of(gpt, settings, mesh);
    gpt = nullptr;  // the layers of other ranks
  }

  torch::nn::Module& net() { return pipeline ? static_cast<torch::nn::Module&>(*pipeline) : *gpt; }
  // Adds to the gradients; gives the loss.
  torch::Tensor train(const torch::Tensor& batch) {
    if (pipeline) {
      return torch::scalar_tensor(pipeline->train_batch(inputs_of(batch), targets_of(batch)));
    }
    const torch::Tensor loss = loss_of(gpt, batch);
    loss.backward();
    return loss.detach();
  }
  double evaluate(const torch::Tensor& batch) {
    if (pipeline) return pipeline->evaluate_batch(inputs_of(batch), targets_of(batch));
    return loss_of(gpt, batch).item<double>();
  }
  void clip(torch::optim::Optimizer& optimizer, double max_norm) {
    if (pipeline) {
      pipeline->clip_grad_norm_(optimizer, max_norm);
    } else {
      sirtaki::clip_grad_norm_(optimizer, max_norm);
    }
  }
  // These options make an optimizer average over the ranks with the same layers.
  sirtaki::DistributedOptimizerOptions optimizer_options(const sirtaki::ProcessSet& alike) {
    return pipeline ? pipeline->optimizer_options()
                    : sirtaki::DistributedOptimizerOptions().process_set(alike);
  }

  Gpt gpt;
  std::unique_ptr<sirtaki::Pipeline> pipeline;
};

// Each rank tests its share of the windows. A pipeline leaves out those at the end that are too few for
// its micro-batches.
double validation_loss(Model& model, const torch::Tensor& windows, const Settings& settings,
                       const sirtaki::Mesh& mesh) {
  torch::NoGradGuard no_grad;
  sirtaki::DistributedSampler sampler(static_cast<std::size_t>(windows.size(0)),
                                      share_of(mesh).shuffle(false).uneven(sirtaki::Uneven::Keep));
  double sum = 0;
  double count = 0;
  while (true) {
    torch::Tensor batch = next_batch(windows, sampler, settings.batch_size);
    if (!batch.defined()) break;
    if (model.pipeline) {
      batch = batch.slice(0, 0, batch.size(0) - batch.size(0) % settings.micro_batches);
    }
    if (batch.size(0) == 0) break;
    sum += model.evaluate(batch) * static_cast<double>(batch.size(0));
    count += static_cast<double>(batch.size(0));
  }
  return sirtaki::metric_average(sum / std::max(count, 1.0), count, "validation loss");
}

sirtaki::Mesh mesh_of(const Settings& settings) {
  const auto check = [](const std::string& flag, std::int64_t value, std::int64_t ranks) {
    if (ranks % value == 0) return;
    throw examples::UsageError(flag + " takes a number that divides the " + std::to_string(ranks) +
                               " ranks, not '" + std::to_string(value) + "'");
  };
  check("--tensor-parallel", settings.tensor_parallel, sirtaki::size());
  check("--pipeline", settings.pipeline, sirtaki::size() / settings.tensor_parallel);
  return sirtaki::mesh({{"data", -1},
                        {"pipe", static_cast<int>(settings.pipeline)},
                        {"tensor", static_cast<int>(settings.tensor_parallel)}});
}

std::int64_t steps_of_an_epoch(const sirtaki::DistributedSampler& sampler, const Settings& settings,
                               const sirtaki::Mesh& mesh) {
  const std::int64_t steps = static_cast<std::int64_t>(sampler.size()) / settings.batch_size;
  if (steps == 0) {
    throw examples::UsageError("the text is too short for a batch of " +
                               std::to_string(settings.batch_size) + " windows on each of " +
                               std::to_string(mesh.size("data")) + " ranks");
  }
  return settings.steps > 0 ? std::min(steps, settings.steps) : steps;
}

void train(const Settings& settings) {
  const torch::Device device = examples::choose_device(settings.device);
  const examples::CurrentDevice current(device);

  const sirtaki::Mesh mesh = mesh_of(settings);
  const sirtaki::ProcessSet alike = mesh.set("data");  // ranks that have the same parts of layers

  const std::string letters = transformer::Writer::text(kLetters);
  const torch::Tensor text =
      torch::tensor(std::vector<std::int64_t>(letters.begin(), letters.end())).to(device);
  const torch::Tensor validation_text = text.slice(0, kLetters / 10 * 9);
  const torch::Tensor windows = windows_of(text.slice(0, 0, kLetters / 10 * 9), settings.context);
  const torch::Tensor validation = windows_of(validation_text, settings.context);
  sirtaki::DistributedSampler sampler(
      static_cast<std::size_t>(windows.size(0)),
      share_of(mesh).seed(static_cast<std::uint64_t>(settings.seed)).uneven(sirtaki::Uneven::Drop));
  const std::int64_t steps = steps_of_an_epoch(sampler, settings, mesh);

  // All ranks draw the same layers, of which each keeps its part.
  sirtaki::seed_all(static_cast<std::uint64_t>(settings.seed), sirtaki::SeedMode::EqualOnAllRanks);
  Model model(settings, mesh, device);
  torch::nn::Module& net = model.net();
  // More ranks make a larger batch; with Adam the learning rate grows with the root of it.
  const double lr = settings.lr * std::sqrt(mesh.size("data"));
  auto optimizer = sirtaki::DistributedOptimizer(
      make_adamw(net, lr), net.named_parameters(),
      model.optimizer_options(alike).shard(transformer::shards().at(settings.shard)));
  sirtaki::broadcast_parameters(net, alike.ranks().front(), alike);
  sirtaki::broadcast_optimizer_state(optimizer, alike.ranks().front(), alike);
  const std::int64_t all_steps = settings.epochs * steps;
  examples::WarmupCosine scheduler(optimizer, lr / 10, lr, all_steps / 10, all_steps);

  std::int64_t epoch = 0;  // how many are done
  const auto checkpoint =
      sirtaki::Checkpoint().model(net).optimizer(optimizer).sampler(sampler).epoch(epoch);
  const std::string file = settings.checkpoint.empty()
                               ? ""
                               : examples::checkpoint_file(settings.checkpoint, "transformer.pt");
  if (settings.resume) examples::resume(file, checkpoint, epoch, scheduler, steps);

  const std::int64_t last = settings.stop_after == 0
                                ? settings.epochs
                                : std::min(settings.epochs, epoch + settings.stop_after);
  examples::Progress progress(settings.epochs);
  double test_loss = epoch < last ? 0 : validation_loss(model, validation, settings, mesh);
  while (epoch < last) {
    sampler.set_epoch(static_cast<std::size_t>(epoch));
    const auto start = std::chrono::steady_clock::now();
    torch::Tensor loss_sum = torch::zeros({}, device);  // on the device: nobody waits for it
    for (std::int64_t step = 1; step <= steps; ++step) {
      optimizer.zero_grad();
      const torch::Tensor loss = model.train(next_batch(windows, sampler, settings.batch_size));
      model.clip(optimizer, /*max_norm=*/1.0);
      optimizer.step();
      scheduler.step();
      loss_sum += loss;
      progress.step(epoch + 1, step, steps);
    }
    const double loss =
        sirtaki::metric_average(loss_sum.item<double>() / static_cast<double>(steps), "loss");
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    ++epoch;
    test_loss = validation_loss(model, validation, settings, mesh);
    char result[96];
    std::snprintf(result, sizeof result, "loss %.4f, validation loss %.4f, %.1f ms a step", loss,
                  test_loss, time.count() / static_cast<double>(steps));
    progress.epoch(epoch, result);
    if (!file.empty()) sirtaki::save_checkpoint(file, checkpoint);
  }
  sirtaki::check_parameters(net, alike);  // throws where a bit of them differs
  if (sirtaki::rank() != 0) return;
  std::printf("parameters identical on all ranks, digest %016llx\n", examples::digest(net));
  std::printf("validation loss: %.6f; by the letters' frequencies alone: %.6f\n", test_loss,
              unigram_entropy(validation_text.cpu()));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    sirtaki::init(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_transformer: %s\n", error.what());
    return EXIT_FAILURE;
  }
  const int rank = sirtaki::rank();
  int exit_code = EXIT_SUCCESS;
  try {
    const Settings settings = examples::agreed(
        [&] { return transformer::parse_arguments(argc, argv); }, transformer::describe);
    if (!settings.help) {
      train(settings);
    } else if (rank == 0) {
      std::fputs(transformer::kHelp, stdout);
    }
  } catch (const examples::UsageError& error) {
    if (rank == 0) std::fprintf(stderr, "train_transformer: %s\n", error.what());
    exit_code = 2;
  } catch (const sirtaki::Error& error) {
    std::fprintf(stderr, "train_transformer: rank %d: %s\n", rank, error.what());
    exit_code = EXIT_FAILURE;
  } catch (const std::exception& error) {
    // Perhaps only this rank knows of the error: the others must not wait for it.
    std::fprintf(stderr, "train_transformer: rank %d: %s\n", rank, error.what());
    if (sirtaki::is_initialized()) sirtaki::abort(error.what());
    exit_code = EXIT_FAILURE;
  }
  sirtaki::shutdown();
  return exit_code;
}
