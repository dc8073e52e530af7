// What the benchmarks share: medians of interleaved runs, and a table with its reference beside it.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace sirtaki::benchmarks {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::duration duration);
double Median(std::vector<double> values);  // precondition: not empty
// CPU time of this process so far, all threads, in seconds.
double CpuSeconds();

// One line of the table. `ratio` says how much better ours is: above 1 ours is.
struct Row {
  std::string work;
  int ranks = 0;
  double value = 0;
  std::string unit;
  std::string reference;
  double reference_value = 0;  // 0: there is none
  bool is_rate = false;        // more is better; else a cost
};

// Prints a table to standard output, and to `json_path` if it is not empty an array of objects
// {work, ranks, value, unit, reference, reference_value, ratio}.
void Print(const std::vector<Row>& rows, const std::string& json_path);

// Runs `ours` and `reference` in turn, `rounds` times after one of each that is not counted;
// medians of what they return (seconds). Which goes first alternates.
struct Pair {
  double ours = 0;
  double reference = 0;
};
Pair Interleave(int rounds, const std::function<double()>& ours,
                const std::function<double()>& reference);

// Runs the body of main: an exception is printed with the program's name, and the exit code is 1.
int Guarded(const std::string& program, const std::function<int()>& body);

// Value of `--name=value` or `--name value`, else `otherwise`.
std::string Flag(int argc, char** argv, const std::string& name, const std::string& otherwise);

}  // namespace sirtaki::benchmarks
