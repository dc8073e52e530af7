// How much a random test does, and from which seed.
//
//   SIRTAKI_TEST_SCALE   unset or "small": the small count; "full": the full one; a number: that many
//                        times the small one, at least 1
//   SIRTAKI_TEST_SEED    the seed that a failing test printed
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <vector>

namespace sirtaki::tests {

int ScaledCount(int small, int full);

// The parameters of a suite that a run tries: all of them, or with a scale below 1 that part of
// them, at least one, others each time. A case that failed is run again by its name with
// SIRTAKI_TEST_SCALE=full.
template <typename T>
std::vector<T> SampleOf(const ::testing::internal::ParamGenerator<T>& parameters) {
  std::vector<T> all(parameters.begin(), parameters.end());
  constexpr int kWhole = 1000;
  const auto share = static_cast<std::size_t>(std::min(ScaledCount(kWhole, kWhole), kWhole));
  std::vector<T> sample;
  std::sample(all.begin(), all.end(), std::back_inserter(sample),
              std::max<std::size_t>(1, all.size() * share / kWhole), std::random_device());
  return sample;
}

// A seed for this test: the one that was asked for, else another one each time. Printed, so that a
// failure can be repeated.
std::uint64_t TestSeed();

}  // namespace sirtaki::tests
