// The settings on train_digits' command line, and a check that all ranks were given the same.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include "flags.h"

namespace digits {

constexpr char kHelp[] =
    "train_digits: trains a convolutional net on handwritten digits.\n"
    "  --epochs N         passes over the training data (15)\n"
    "  --batch-size N     samples in a batch of one rank (32)\n"
    "  --accumulate N     batches whose gradients add up to one step (1)\n"
    "  --optimizer NAME   sgd, adam, adamw, rmsprop or adagrad (sgd)\n"
    "  --lr X             learning rate of one rank; multiplied by the number of ranks\n"
    "                     (sgd 0.02, adam and adamw 0.002, rmsprop 0.001, adagrad 0.01)\n"
    "  --compression T    what gradients travel as between hosts: none, f16 or bf16 (none)\n"
    "  --powersgd RANK    gradients travel as factors of this rank, 1 to 4 (0: whole), once the\n"
    "                     learning rate has risen\n"
    "  --uneven HOW       samples that cannot be shared out evenly: pad repeats some, drop leaves\n"
    "                     some out (drop)\n"
    "  --device NAME      cpu, cuda, or auto: cuda if every rank has a GPU of its own (cpu)\n"
    "  --seed N           of the split, the shuffling and the initial weights (1)\n"
    "  --data FILE        lines of 64 pixels (0..16) and a class (0..9), separated by commas\n"
    "                     (data/digits.csv of the examples)\n"
    "  --checkpoint DIR   saves the run in this folder after every epoch\n"
    "  --resume           goes on with what --checkpoint has saved\n"
    "  --stop-after N     ends after N epochs, for a job that has only so much time (0: never)\n"
    "  --help             this text\n"
    "Options of the library are given as --sirtaki-name=value.\n";

struct Settings {
  std::int64_t epochs = 15;
  std::int64_t batch_size = 32;
  std::int64_t accumulate = 1;
  std::string optimizer = "sgd";
  double lr = 0;  // 0: the optimizer's
  std::string compression = "none";
  std::int64_t powersgd = 0;
  std::string uneven = "drop";
  std::string device = "cpu";
  std::int64_t seed = 1;
  std::string data;
  std::string checkpoint;
  bool resume = false;
  std::int64_t stop_after = 0;
  bool help = false;
};

using examples::parse_choice;
using examples::parse_count;
using examples::parse_positive;

inline Settings parse_arguments(int argc, char** argv) {
  Settings settings;
  using Value = const std::string&;
  const examples::Flags flags = {
      {"--epochs", [&](Value f, Value v) { settings.epochs = parse_count(f, v, 1); }},
      {"--batch-size", [&](Value f, Value v) { settings.batch_size = parse_count(f, v, 1); }},
      {"--accumulate", [&](Value f, Value v) { settings.accumulate = parse_count(f, v, 1); }},
      {"--optimizer",
       [&](Value f, Value v) {
         settings.optimizer = parse_choice(f, v, {"sgd", "adam", "adamw", "rmsprop", "adagrad"});
       }},
      {"--lr", [&](Value f, Value v) { settings.lr = parse_positive(f, v); }},
      {"--compression",
       [&](Value f, Value v) {
         settings.compression = parse_choice(f, v, {"none", "f16", "bf16"});
       }},
      {"--powersgd", [&](Value f, Value v) { settings.powersgd = parse_count(f, v, 0, 4); }},
      {"--uneven",
       [&](Value f, Value v) {
         settings.uneven = parse_choice(f, v, {"pad", "drop"});
       }},
      {"--device",
       [&](Value f, Value v) {
         settings.device = parse_choice(f, v, {"cpu", "cuda", "auto"});
       }},
      {"--seed", [&](Value f, Value v) { settings.seed = parse_count(f, v, 0); }},
      {"--data", [&](Value, Value v) { settings.data = v; }},
      {"--checkpoint", [&](Value, Value v) { settings.checkpoint = v; }},
      {"--stop-after", [&](Value f, Value v) { settings.stop_after = parse_count(f, v, 0); }},
  };
  examples::parse_flags(
      argc, argv, flags,
      {{"--help", &settings.help}, {"-h", &settings.help}, {"--resume", &settings.resume}});
  if (settings.resume && settings.checkpoint.empty()) {
    throw examples::UsageError(
        "--resume needs --checkpoint DIR, where it finds the run to go on with");
  }
  if (settings.powersgd > 0 && settings.compression != "none") {
    throw examples::UsageError("--powersgd compresses itself: leave out --compression");
  }
  return settings;
}

// The settings that must be the same on all ranks, a line each. Folders and files are not among
// them: they may lie elsewhere on another host.
inline std::string describe(const Settings& settings) {
  std::ostringstream text;
  text << "--epochs " << settings.epochs << "\n--batch-size " << settings.batch_size
       << "\n--accumulate " << settings.accumulate << "\n--optimizer " << settings.optimizer
       << "\n--lr " << settings.lr << "\n--compression " << settings.compression << "\n--powersgd "
       << settings.powersgd << "\n--uneven " << settings.uneven << "\n--device " << settings.device
       << "\n--seed " << settings.seed << "\n--checkpoint "
       << (settings.checkpoint.empty() ? "not given" : "given") << "\n--resume "
       << (settings.resume ? "given" : "not given") << "\n--stop-after " << settings.stop_after
       << "\n--help " << (settings.help ? "given" : "not given") << "\n";
  return text.str();
}

// The settings of all ranks, as examples::agreed has them.
inline Settings agreed_settings(int argc, char** argv) {
  return examples::agreed([&] { return parse_arguments(argc, argv); }, describe);
}

}  // namespace digits
