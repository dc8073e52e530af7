#include "ops/shm/backend.h"

#include <gtest/gtest.h>

#include <tuple>

#include "ops/inproc/inproc_backend.h"
#include "tests/support/backend_conformance.h"
#include "tests/support/rank_threads.h"
#include "tests/support/shm_ranks.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops::shm {
namespace {

using tests::RankThreads;
using tests::Seen;
using tests::ShmRanks;

class ShmConformanceTest : public ::testing::TestWithParam<std::tuple<int, Seen, bool>> {};

void ExpectConformance(int size, Seen seen, bool blocks, bool verify = false) {
  ShmRanks ranks(size, seen);
  InprocWorld messages(size);
  BackendOptions options;
  options.large_lane_blocks = blocks;
  options.spin = false;
  options.verify = verify;
  RankThreads::Run(size, [&](int rank) {
    const std::unique_ptr<ops::Backend> flat = messages.Connect(rank);
    const auto shared = ranks.Connect(rank, *flat, options);
    tests::BackendConformance conformance(shared->backend, rank, size);
    for (const tests::BackendCheck& check : tests::kBackendChecks) {
      SCOPED_TRACE(check.name);
      RankThreads::Note(check.name);
      (conformance.*check.run)();
    }
  });
}

TEST_P(ShmConformanceTest, Conforms) {
  const auto [size, seen, blocks] = GetParam();
  ExpectConformance(size, seen, blocks);
}

TEST(ShmVerifiedTest, Conforms) {
  ExpectConformance(3, Seen::kAll, /*blocks=*/true, /*verify=*/true);
  ExpectConformance(2, Seen::kNothing, /*blocks=*/false, /*verify=*/true);
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<int, Seen, bool>>& made) {
  return std::to_string(std::get<0>(made.param)) + "Seeing" +
         std::string(tests::SeenName(std::get<1>(made.param))) +
         (std::get<2>(made.param) ? "Blocking" : "Polled");
}

INSTANTIATE_TEST_SUITE_P(Few, ShmConformanceTest,
                         ::testing::ValuesIn(tests::SampleOf<std::tuple<int, Seen, bool>>(
                             ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                                ::testing::Values(Seen::kAll, Seen::kNothing),
                                                ::testing::Bool()))),
                         NameOf);
INSTANTIATE_TEST_SUITE_P(More, ShmConformanceTest,
                         ::testing::Values(std::tuple(7, Seen::kAll, true)), NameOf);

}  // namespace
}  // namespace sirtaki::ops::shm
