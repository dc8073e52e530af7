#include "benchmarks/support/report.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>

namespace sirtaki::benchmarks {
namespace {

double Ratio(const Row& row) {
  if (row.reference_value <= 0 || row.value <= 0) return 0;
  return row.is_rate ? row.value / row.reference_value : row.reference_value / row.value;
}

}  // namespace

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

void Print(const std::vector<Row>& rows, const std::string& json_path) {
  std::printf("%-44s %5s %14s  %-34s %14s %7s\n", "work", "ranks", "ours", "reference", "",
              "ratio");
  for (const Row& row : rows) {
    char ours[32];
    std::snprintf(ours, sizeof ours, "%.4g %s", row.value, row.unit.c_str());
    char theirs[32] = "-";
    char ratio[16] = "-";
    if (row.reference_value > 0) {
      std::snprintf(theirs, sizeof theirs, "%.4g %s", row.reference_value, row.unit.c_str());
      std::snprintf(ratio, sizeof ratio, "%.2f", Ratio(row));
    }
    std::printf("%-44s %5d %14s  %-34s %14s %7s\n", row.work.c_str(), row.ranks, ours,
                row.reference.c_str(), theirs, ratio);
  }
  std::fflush(stdout);
  if (json_path.empty()) return;
  std::ofstream json(json_path);
  json << "[\n";
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];  // names and units are this program's own and need no escaping
    json << "  {\"work\": \"" << row.work << "\", \"ranks\": " << row.ranks
         << ", \"value\": " << row.value << ", \"unit\": \"" << row.unit << "\", \"reference\": \""
         << row.reference << "\", \"reference_value\": " << row.reference_value
         << ", \"ratio\": " << Ratio(row) << "}" << (i + 1 < rows.size() ? "," : "") << "\n";
  }
  json << "]\n";
  if (!json) std::fprintf(stderr, "cannot write %s\n", json_path.c_str());
}

Pair Interleave(int rounds, const std::function<double()>& ours,
                const std::function<double()>& reference) {
  std::vector<double> a;
  std::vector<double> b;
  ours();
  reference();
  for (int round = 0; round < rounds; ++round) {
    if (round % 2 == 0) a.push_back(ours());
    b.push_back(reference());
    if (round % 2 == 1) a.push_back(ours());
  }
  return {Median(std::move(a)), Median(std::move(b))};
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

}  // namespace sirtaki::benchmarks
