// The settings on train_transformer's command line.
#pragma once

#include <sirtaki/torch.h>

#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "flags.h"

namespace transformer {

constexpr char kHelp[] =
    "train_transformer: trains a small GPT on the letters of made-up sentences.\n"
    "  --epochs N         passes over the training text (4)\n"
    "  --steps N          ends an epoch after N steps (0: all of the text)\n"
    "  --batch-size N     windows of text in a batch of one rank (16)\n"
    "  --context N        letters in a window (64)\n"
    "  --layers N         blocks of the transformer (2)\n"
    "  --width N          numbers for each letter, a multiple of 32; a head has 32 (128)\n"
    "  --lr X             highest learning rate of one rank; grows with the root of the ranks "
    "(0.002)\n"
    "  --shard WHAT       what is kept once for all ranks in place of once on each: none;\n"
    "                     optimizer, AdamW's state; or gradients, that and the gradients (none)\n"
    "  --tensor-parallel N  ranks that share each layer, which see the same windows (1)\n"
    "  --pipeline N       stages of a pipeline, each on a rank of its own, or on ranks that share "
    "its layers (1)\n"
    "  --micro-batches N  parts of a batch that are in the pipeline at the same time (4)\n"
    "  --recompute        a block runs again in the backward pass in place of being remembered\n"
    "  --device NAME      cpu, cuda, or auto: cuda if every rank has a GPU of its own (cpu)\n"
    "  --seed N           of the order and the initial weights (1)\n"
    "  --checkpoint DIR   saves the run in this folder after every epoch\n"
    "  --resume           goes on with what --checkpoint has saved\n"
    "  --stop-after N     ends after N epochs, for a job that has only so much time (0: never)\n"
    "  --help             this text\n"
    "Options of the library are given as --sirtaki-name=value.\n";

constexpr std::int64_t kBytes = 128;     // that a letter may be
constexpr std::int64_t kHeadWidth = 32;  // of an attention head

// What --shard takes.
inline const std::map<std::string, sirtaki::Shard>& shards() {
  static const std::map<std::string, sirtaki::Shard> all = {
      {"none", sirtaki::Shard::None},
      {"optimizer", sirtaki::Shard::OptimizerState},
      {"gradients", sirtaki::Shard::Gradients},
  };
  return all;
}

struct Settings {
  std::int64_t epochs = 4;
  std::int64_t steps = 0;
  std::int64_t batch_size = 16;
  std::int64_t context = 64;
  std::int64_t layers = 2;
  std::int64_t width = 128;
  double lr = 0.002;
  std::string shard = "none";
  std::int64_t tensor_parallel = 1;
  std::int64_t pipeline = 1;
  std::int64_t micro_batches = 4;
  bool recompute = false;
  std::string device = "cpu";
  std::int64_t seed = 1;
  std::string checkpoint;
  bool resume = false;
  std::int64_t stop_after = 0;
  bool help = false;
};

inline void check_pipeline(const Settings& settings) {
  if (settings.shard == "gradients") {
    throw examples::UsageError(
        "--shard gradients takes no --pipeline: the first and the last stage have one matrix, "
        "whose gradient counts once");
  }
  if (!settings.checkpoint.empty()) {
    throw examples::UsageError(
        "--checkpoint takes no --pipeline: a checkpoint has one model for all ranks");
  }
  if (settings.batch_size % settings.micro_batches != 0) {
    throw examples::UsageError("--micro-batches takes a number that divides the batch of " +
                               std::to_string(settings.batch_size) + " windows, not '" +
                               std::to_string(settings.micro_batches) + "'");
  }
}

inline Settings parse_arguments(int argc, char** argv) {
  using examples::parse_choice;
  using examples::parse_count;
  Settings settings;
  std::vector<std::string> shard_names;
  for (const auto& [name, shard] : shards()) shard_names.push_back(name);
  using Value = const std::string&;
  const examples::Flags flags = {
      {"--epochs", [&](Value f, Value v) { settings.epochs = parse_count(f, v, 1); }},
      {"--steps", [&](Value f, Value v) { settings.steps = parse_count(f, v, 0); }},
      {"--batch-size", [&](Value f, Value v) { settings.batch_size = parse_count(f, v, 1); }},
      {"--context", [&](Value f, Value v) { settings.context = parse_count(f, v, 1, 4096); }},
      {"--layers", [&](Value f, Value v) { settings.layers = parse_count(f, v, 1, 1000); }},
      {"--width", [&](Value f, Value v) { settings.width = parse_count(f, v, kHeadWidth, 32768); }},
      {"--lr", [&](Value f, Value v) { settings.lr = examples::parse_positive(f, v); }},
      {"--shard", [&](Value f, Value v) { settings.shard = parse_choice(f, v, shard_names); }},
      {"--tensor-parallel",
       [&](Value f, Value v) { settings.tensor_parallel = parse_count(f, v, 1, kBytes); }},
      {"--pipeline", [&](Value f, Value v) { settings.pipeline = parse_count(f, v, 1, 1000); }},
      {"--micro-batches",
       [&](Value f, Value v) { settings.micro_batches = parse_count(f, v, 1, 1000); }},
      {"--device",
       [&](Value f, Value v) {
         settings.device = parse_choice(f, v, {"cpu", "cuda", "auto"});
       }},
      {"--seed", [&](Value f, Value v) { settings.seed = parse_count(f, v, 0); }},
      {"--checkpoint", [&](Value, Value v) { settings.checkpoint = v; }},
      {"--stop-after", [&](Value f, Value v) { settings.stop_after = parse_count(f, v, 0); }},
  };
  examples::parse_flags(argc, argv, flags,
                        {{"--help", &settings.help},
                         {"-h", &settings.help},
                         {"--recompute", &settings.recompute},
                         {"--resume", &settings.resume}});
  if (settings.width % kHeadWidth != 0) {
    throw examples::UsageError("--width takes a multiple of " + std::to_string(kHeadWidth) +
                               ", not '" + std::to_string(settings.width) + "'");
  }
  if (settings.tensor_parallel > 1 && settings.shard == "gradients") {
    throw examples::UsageError(
        "--shard gradients takes no --tensor-parallel: shards of parts cannot be clipped");
  }
  if (settings.tensor_parallel > 1 && !settings.checkpoint.empty()) {
    throw examples::UsageError(
        "--checkpoint takes no --tensor-parallel: a checkpoint has one model for all ranks");
  }
  if (settings.pipeline > 1) check_pipeline(settings);
  if (settings.resume && settings.checkpoint.empty()) {
    throw examples::UsageError(
        "--resume needs --checkpoint DIR, where it finds the run to go on with");
  }
  return settings;
}

// The settings that must be the same on all ranks, a line each. The folder is not among them: it
// may lie elsewhere on another host.
inline std::string describe(const Settings& settings) {
  const auto given = [](bool is) { return is ? "given" : "not given"; };
  std::ostringstream text;
  text << "--epochs " << settings.epochs << "\n--steps " << settings.steps << "\n--batch-size "
       << settings.batch_size << "\n--context " << settings.context << "\n--layers "
       << settings.layers << "\n--width " << settings.width << "\n--lr " << settings.lr
       << "\n--shard " << settings.shard << "\n--tensor-parallel " << settings.tensor_parallel
       << "\n--pipeline " << settings.pipeline << "\n--micro-batches " << settings.micro_batches
       << "\n--recompute " << given(settings.recompute) << "\n--device " << settings.device
       << "\n--seed " << settings.seed << "\n--checkpoint " << given(!settings.checkpoint.empty())
       << "\n--resume " << given(settings.resume) << "\n--stop-after " << settings.stop_after
       << "\n--help " << given(settings.help) << "\n";
  return text.str();
}

}  // namespace transformer
