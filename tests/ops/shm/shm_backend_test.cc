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

class ShmConformanceTest : public ::testing::TestWithParam<std::tuple<int, Seen>> {};

void ExpectConformance(int size, Seen seen, bool verify = false) {
  ShmRanks ranks(size, seen);
  InprocWorld messages(size);
  BackendOptions options;
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
  const auto [size, seen] = GetParam();
  ExpectConformance(size, seen);
}

TEST(ShmVerifiedTest, Conforms) {
  ExpectConformance(3, Seen::kAll, /*verify=*/true);
  ExpectConformance(2, Seen::kNothing, /*verify=*/true);
}

std::string NameOf(const ::testing::TestParamInfo<std::tuple<int, Seen>>& made) {
  return std::to_string(std::get<0>(made.param)) + "Seeing" +
         std::string(tests::SeenName(std::get<1>(made.param)));
}

INSTANTIATE_TEST_SUITE_P(Few, ShmConformanceTest,
                         ::testing::ValuesIn(tests::SampleOf<std::tuple<int, Seen>>(
                             ::testing::Combine(::testing::Values(1, 2, 3, 4, 7),
                                                ::testing::Values(Seen::kAll, Seen::kNothing)))),
                         NameOf);

}  // namespace
}  // namespace sirtaki::ops::shm
