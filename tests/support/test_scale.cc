#include "tests/support/test_scale.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <string>

#include "core/base/environment.h"

namespace sirtaki::tests {
namespace {

template <typename Number, typename Parse>
Number ParseOrDie(const std::string& variable, const std::string& text, Parse parse) {
  try {
    std::size_t used = 0;
    const Number number = parse(text, &used);
    if (used == text.size()) return number;
  } catch (const std::exception&) {  // NOLINT: told below
  }
  // Not a test failure: without the number the run would not be the one that was asked for.
  std::fprintf(stderr, "%s is \"%s\", which is no number\n", variable.c_str(), text.c_str());
  std::exit(1);
}

}  // namespace

int ScaledCount(int small, int full) {
  const std::string variable = "SIRTAKI_TEST_SCALE";
  const auto scale = core::EnvironmentView::OfProcess().Find(variable);
  if (!scale || *scale == "small") return small;
  if (*scale == "full") return full;
  const double factor = ParseOrDie<double>(
      variable, *scale,
      [](const std::string& text, std::size_t* used) { return std::stod(text, used); });
  return static_cast<int>(std::clamp(small * factor, 1.0, 1e9));
}

std::uint64_t TestSeed() {
  const std::string variable = "SIRTAKI_TEST_SEED";
  const auto given = core::EnvironmentView::OfProcess().Find(variable);
  std::uint64_t seed = 0;
  if (given) {
    seed = ParseOrDie<std::uint64_t>(
        variable, *given,
        [](const std::string& text, std::size_t* used) { return std::stoull(text, used); });
  } else {
    seed = std::random_device{}();
  }
  std::printf("SIRTAKI_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  ::testing::Test::RecordProperty("seed", std::to_string(seed));
  return seed;
}

}  // namespace sirtaki::tests
