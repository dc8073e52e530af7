// Parses the examples' command lines, and checks that all ranks were given the same.
#pragma once

#include <sirtaki/torch.h>

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

namespace examples {

// An error that every rank knows: one of them reports it.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::int64_t parse_count(const std::string& flag, const std::string& text,
                                std::int64_t least, std::int64_t most = 1000000000) {
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < least || value > most) {
    throw UsageError(flag + " takes a whole number from " + std::to_string(least) + " to " +
                     std::to_string(most) + ", not '" + text + "'");
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

// Flags, each with the function that takes its value, and switches, each with what it sets.
using Flags =
    std::map<std::string, std::function<void(const std::string& flag, const std::string& value)>>;
using Switches = std::map<std::string, bool*>;

// `--flag value`, `--flag=value` and `--switch`, in any order.
inline void parse_flags(int argc, char** argv, const Flags& flags, const Switches& switches) {
  for (int i = 1; i < argc; ++i) {
    std::string flag = argv[i];
    const auto known_switch = switches.find(flag);
    if (known_switch != switches.end()) {
      *known_switch->second = true;
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
}

// Returns what `parse` gives on this rank. If one rank made a mistake, or settings differ in a line
// of what `describe` says, every rank throws: ranks that make different numbers of steps would wait
// for each other.
template <class Parse, class Describe>
auto agreed(const Parse& parse, const Describe& describe) {
  constexpr char kMistake = '!';
  decltype(parse()) settings;
  std::string text;
  try {
    settings = parse();
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

}  // namespace examples
