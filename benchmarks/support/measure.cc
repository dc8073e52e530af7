#include "benchmarks/support/measure.h"

#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <limits>
#include <sstream>
#include <utility>

namespace sirtaki::benchmarks {

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::vector<double> Interleave(int rounds, const std::vector<Variant>& variants,
                               double most_seconds) {
  std::vector<std::vector<double>> samples(variants.size());
  double all = 0;
  for (const Variant& variant : variants) all += variant.run();
  // All ranks decide alike, since run() returns the same on all of them.
  if (all * rounds > most_seconds) {
    rounds = std::max(std::min(rounds, 3), static_cast<int>(most_seconds / all));
  }
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < variants.size(); ++i) {
      const std::size_t turn = (i + static_cast<std::size_t>(round)) % variants.size();
      samples[turn].push_back(variants[turn].run());
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& values : samples) medians.push_back(Median(std::move(values)));
  return medians;
}

Pair Interleave(int rounds, std::function<double()> ours, std::function<double()> reference) {
  const std::vector<double> medians =
      Interleave(rounds, {{kOurs, std::move(ours)}, {"reference", std::move(reference)}});
  return {medians[0], medians[1]};
}

void Emit(const Sample& sample) {
  // Names and units are the programs' own and need no escaping.
  std::printf(
      "{\"work\": \"%s\", \"ranks\": %d, \"variant\": \"%s\", \"value\": %.6g, \"unit\": \"%s\"}\n",
      sample.work.c_str(), sample.ranks, sample.variant.c_str(), sample.value, sample.unit.c_str());
  std::fflush(stdout);
}

void Emit(const Row& row) {
  Emit(Sample{row.work, row.ranks, kOurs, row.value, row.unit});
  Emit(Sample{row.work, row.ranks, row.reference, row.reference_value, row.unit});
}

int Guarded(const std::string& program, const std::function<int()>& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program.c_str(), error.what());
    return 1;
  }
}

std::string Flag(int argc, char** argv, const std::string& name, const std::string& otherwise) {
  const std::string flag = "--" + name;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == flag && i + 1 < argc) return argv[i + 1];
    if (argument.rfind(flag + "=", 0) == 0) return argument.substr(flag.size() + 1);
  }
  return otherwise;
}

std::vector<std::string> ListFlag(int argc, char** argv, const std::string& name,
                                  const std::string& otherwise) {
  std::istringstream list(Flag(argc, argv, name, otherwise));
  std::vector<std::string> words;
  for (std::string word; std::getline(list, word, ',');) words.push_back(word);
  return words;
}

void KeepMemory() {
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_ARENA_MAX, 1);
}

}  // namespace sirtaki::benchmarks
