// What the benchmarks share: medians of runs in turn, and the lines that the driver reads.
#pragma once

#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <vector>

namespace sirtaki::benchmarks {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::duration duration);
double Median(std::vector<double> values);  // precondition: not empty
// CPU time of this process so far, all threads, in seconds.
double CpuSeconds();

// One way to do a work; `run` does it once and returns what it cost.
struct Variant {
  std::string name;
  std::function<double()> run;
};

// Runs all of them once without counting, then in turn, `rounds` times, each time beginning with
// another one. The median of each. `most_seconds`: for variants whose run() returns the seconds that
// it took, the same on all ranks; where all rounds would take longer there are fewer, but at least 3.
std::vector<double> Interleave(int rounds, const std::vector<Variant>& variants,
                               double most_seconds = std::numeric_limits<double>::infinity());

struct Pair {
  double ours = 0;
  double reference = 0;
};
Pair Interleave(int rounds, std::function<double()> ours, std::function<double()> reference);

// How ours is called among the variants of a work; all others are references.
inline constexpr const char* kOurs = "ours";

// One number of one variant, as a line of JSON on standard output. A unit with "/s" is a rate, of
// which more is better; of others less is.
struct Sample {
  std::string work;
  int ranks = 1;
  std::string variant;
  double value = 0;
  std::string unit;
};
void Emit(const Sample& sample);

// Ours and one reference.
struct Row {
  std::string work;
  int ranks = 0;
  double value = 0;
  std::string unit;
  std::string reference;
  double reference_value = 0;
};
void Emit(const Row& row);

// Runs the body of main: an exception is printed with the program's name, and the exit code is 1.
int Guarded(const std::string& program, const std::function<int()>& body);

// Value of `--name=value` or `--name value`, else `otherwise`.
std::string Flag(int argc, char** argv, const std::string& name, const std::string& otherwise);
// ListFlag is TextFlag for a list with commas.
std::vector<std::string> ListFlag(int argc, char** argv, const std::string& name,
                                  const std::string& otherwise);

// Makes malloc keep what is freed: whoever asks again gets memory whose pages are there.
void KeepMemory();

}  // namespace sirtaki::benchmarks
