#include "ops/shm/backend.h"

#include <gtest/gtest.h>

#include <tuple>

#include "ops/inproc/inproc_backend.h"
#include "tests/support/backend_conformance.h"
#include "tests/support/rank_threads.h"
#include "tests/support/shm_ranks.h"

namespace sirtaki::ops::shm {
namespace {

using tests::RankThreads;
using tests::Seen;
using tests::ShmRanks;

class ShmConformanceTest : public ::testing::TestWithParam<std::tuple<int, Seen, bool>> {};

TEST_P(ShmConformanceTest, Conforms) {
  const auto [size, seen, blocks] = GetParam();
  ShmRanks ranks(size, seen);
  InprocWorld messages(size);
  BackendOptions options;
  options.large_lane_blocks = blocks;
  options.spin = false;
  RankThreads::Run(size, [&, n = size](int rank) {
    const std::unique_ptr<ops::Backend> flat = messages.Connect(rank);
    const auto shared = ranks.Connect(rank, *flat, options);
    tests::BackendConformance conformance(shared->backend, rank, n);
    for (const tests::BackendCheck& check : tests::kBackendChecks) {
      SCOPED_TRACE(check.name);
      RankThreads::Note(check.name);
      (conformance.*check.run)();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShmConformanceTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 7),
                                            ::testing::Values(Seen::kAll, Seen::kNothing),
                                            ::testing::Bool()),
                         [](const auto& instance) {
                           return std::to_string(std::get<0>(instance.param)) + "Seeing" +
                                  std::string(tests::SeenName(std::get<1>(instance.param))) +
                                  (std::get<2>(instance.param) ? "Blocking" : "Polled");
                         });

}  // namespace
}  // namespace sirtaki::ops::shm
