// What train_digits is told on its command line, and that all ranks were told the same.
#pragma once

#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

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
    "  --uneven HOW       samples that cannot be shared out evenly: pad repeats some, drop leaves\n"
    "                     some out (drop)\n"
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
  std::string uneven = "drop";
  std::int64_t seed = 1;
  std::string data;
  std::string checkpoint;
  bool resume = false;
  std::int64_t stop_after = 0;
  bool help = false;
};

// Known to every rank: one of them says so.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::int64_t parse_count(const std::string& flag, const std::string& text,
                                std::int64_t least) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < least || value > 1000000000) {
    throw UsageError(flag + " takes a whole number of at least " + std::to_string(least) +
                     ", not '" + text + "'");
  }
  return value;
}

inline double parse_positive(const std::string& flag, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value) || value <= 0) {
    throw UsageError(flag + " takes a positive number, not '" + text + "'");
  }
  return value;
}

inline std::string parse_choice(const std::string& flag, const std::string& text,
                                const std::vector<std::string>& choices) {
  std::string list;
  for (const std::string& choice : choices) {
    if (choice == text) return text;
    list += (list.empty() ? "" : ", ") + choice;
  }
  throw UsageError(flag + " takes one of " + list + ", not '" + text + "'");
}

inline Settings parse_arguments(int argc, char** argv) {
  Settings settings;
  using Value = const std::string&;
  const std::map<std::string, std::function<void(Value flag, Value value)>> flags = {
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
      {"--uneven",
       [&](Value f, Value v) {
         settings.uneven = parse_choice(f, v, {"pad", "drop"});
       }},
      {"--seed", [&](Value f, Value v) { settings.seed = parse_count(f, v, 0); }},
      {"--data", [&](Value, Value v) { settings.data = v; }},
      {"--checkpoint", [&](Value, Value v) { settings.checkpoint = v; }},
      {"--stop-after", [&](Value f, Value v) { settings.stop_after = parse_count(f, v, 0); }},
  };
  for (int i = 1; i < argc; ++i) {
    std::string flag = argv[i];
    if (flag == "--help" || flag == "-h") {
      settings.help = true;
      continue;
    }
    if (flag == "--resume") {
      settings.resume = true;
      continue;
    }
    std::string value;
    const auto equals = flag.find('=');
    const bool joined = equals != std::string::npos;
    if (joined) {
      value = flag.substr(equals + 1);
      flag.resize(equals);
    }
    const auto known = flags.find(flag);
    if (known == flags.end()) {
      throw UsageError("unknown argument '" + flag + "'; --help shows what there is");
    }
    if (!joined) {
      if (i + 1 == argc) throw UsageError(flag + " needs a value");
      value = argv[++i];
    }
    known->second(flag, value);
  }
  if (settings.resume && settings.checkpoint.empty()) {
    throw UsageError("--resume needs --checkpoint DIR, where it finds the run to go on with");
  }
  return settings;
}

// What has to be the same on all ranks, a line each. Folders and files may lie elsewhere on another
// host.
inline std::string describe(const Settings& settings) {
  std::ostringstream text;
  text << "--epochs " << settings.epochs << "\n--batch-size " << settings.batch_size
       << "\n--accumulate " << settings.accumulate << "\n--optimizer " << settings.optimizer
       << "\n--lr " << settings.lr << "\n--compression " << settings.compression << "\n--uneven "
       << settings.uneven << "\n--seed " << settings.seed << "\n--checkpoint "
       << (settings.checkpoint.empty() ? "not given" : "given") << "\n--resume "
       << (settings.resume ? "given" : "not given") << "\n--stop-after " << settings.stop_after
       << "\n--help " << (settings.help ? "given" : "not given") << "\n";
  return text.str();
}

// The settings of all ranks. A mistake on one of them, or settings that differ, are thrown on every
// one: ranks that make different numbers of steps would wait for each other.
inline Settings agreed_settings(int argc, char** argv) {
  constexpr char kMistake = '!';
  Settings settings;
  std::string text;
  try {
    settings = parse_arguments(argc, argv);
    text = describe(settings);
  } catch (const UsageError& error) {
    text = kMistake + std::string(error.what());
  }
  const std::vector<std::string> texts = sirtaki::allgather_object(text, "settings");
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank][0] != kMistake) continue;
    const bool on_all = std::count(texts.begin(), texts.end(), texts[rank]) ==
                        static_cast<std::ptrdiff_t>(texts.size());
    throw UsageError((on_all ? "" : "rank " + std::to_string(rank) + ": ") + texts[rank].substr(1));
  }
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    std::istringstream first(texts[0]);
    std::istringstream other(texts[rank]);
    std::string of_first;
    std::string of_other;
    while (std::getline(first, of_first) && std::getline(other, of_other)) {
      if (of_first == of_other) continue;
      throw UsageError("the ranks have different settings: " + of_first + " on rank 0, " +
                       of_other + " on rank " + std::to_string(rank));
    }
  }
  return settings;
}

}  // namespace digits
