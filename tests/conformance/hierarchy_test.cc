// The table on threads that pretend to be several hosts whose ranks share memory: reductions go
// within each host first.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "frameworks/torch/session/session_state.h"
#include "session/inproc/inproc_world.h"
#include "session/session.h"
#include "tests/conformance/case_runner.h"
#include "tests/support/rank_threads.h"
#include "tests/support/test_scale.h"

namespace sirtaki::tests::conformance {
namespace {

using session::InprocWorld;

// Which host each rank is on.
using Hosts = std::vector<int>;

// Nothing is small, and a tensor of 1 MiB is several chunks.
core::Config ConfigByHosts() {
  core::Config config;
  config.hierarchy = core::HierarchyMode::kOn;
  config.small_bytes = 0;
  config.chunk_bytes = 48 << 10;
  return config;
}

void RunByHosts(const Hosts& hosts, const std::function<void(int rank)>& body) {
  const auto world = std::make_shared<InprocWorld>(static_cast<int>(hosts.size()), hosts);
  world->Share(InprocWorld::Sharing::kStaged);
  RankThreads::Run(static_cast<int>(hosts.size()), [&](int rank) {
    session::StartOptions options;
    options.config = ConfigByHosts();
    std::shared_ptr<session::Session> session;
    const core::Status started = session::Session::CreateInproc(world, rank, options, &session);
    ASSERT_TRUE(started.ok()) << started.ToString();
    EXPECT_NE(session->description().find("all-reduce between hosts: hierarchical"),
              std::string::npos)
        << session->description();
    {
      const detail::SessionScope scope(std::make_shared<detail::SessionState>(session));
      body(rank);
    }
    EXPECT_TRUE(session->Shutdown("the test is over").ok());
  });
}

std::string NameOf(const Hosts& hosts) {
  std::string name = "hosts_";
  for (const int host : hosts) name += std::to_string(host);
  return name;
}

// Two hosts exchange what crosses; more leave it to the medium. Two ranks are either one host, or
// two that have nothing to reduce first.
const Hosts kWorlds[] = {{0, 0, 1},    {0, 1, 0},    {0, 0, 1, 1},
                         {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 0, 1, 2}};

class CollectivesByHostsTest : public ::testing::TestWithParam<std::tuple<int, Hosts>> {};

TEST_P(CollectivesByHostsTest, GiveWhatNaiveLoopsGive) {
  const auto& [parameter, hosts] = GetParam();
  const auto collective = static_cast<Collective>(parameter);
  const bool by_hosts = collective == Collective::kAllReduce || collective == Collective::kReduce;
  const int percent = tests::ScaledCount(by_hosts ? 10 : 2, 100);  // the others go their usual ways
  const std::uint64_t seed = tests::TestSeed();
  RunByHosts(hosts, [&](int rank) {
    CaseRunner runner;
    runner.TellOfEach(RankThreads::Note);
    runner.Run(collective, percent, seed);
    runner.RemoveSets();
    if (rank == 0) std::printf("%lld cases\n", static_cast<long long>(runner.cases()));
  });
}

INSTANTIATE_TEST_SUITE_P(All, CollectivesByHostsTest,
                         ::testing::Combine(::testing::Range(0, kCollectiveCount),
                                            ::testing::ValuesIn(kWorlds)),
                         [](const auto& made) {
                           const auto collective = static_cast<Collective>(std::get<0>(made.param));
                           return std::string(NameOf(collective)) + "_" +
                                  NameOf(std::get<1>(made.param));
                         });

class SumsByHostsTest : public ::testing::TestWithParam<Hosts> {};

// The table's numbers are such that no order of adding shows. In these it does.
TEST_P(SumsByHostsTest, HaveTheSameBitsOnAllRanks) {
  const Hosts& hosts = GetParam();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    std::vector<std::vector<at::Tensor>> results(hosts.size());
    RunByHosts(hosts, [&](int rank) {
      for (const std::int64_t count : {1, 20001, 300007}) {
        const at::Tensor values = at::arange(1, count + 1, at::kDouble);
        const at::Tensor sizes = at::pow(10.0, at::remainder(values + rank, 7) - 3);
        const at::Tensor given = (at::sin(values * (rank + 1)) * sizes).to(dtype);
        results[static_cast<std::size_t>(rank)].push_back(
            allreduce(given, AllreduceOptions().op(ReduceOp::Sum)));
      }
    });
    for (std::size_t rank = 1; rank < hosts.size(); ++rank) {
      for (std::size_t i = 0; i < results[0].size(); ++i) {
        const at::Tensor& one = results[0][i];
        const at::Tensor& other = results[rank][i];
        ASSERT_EQ(one.nbytes(), other.nbytes());
        EXPECT_EQ(std::memcmp(one.data_ptr(), other.data_ptr(), one.nbytes()), 0)
            << "of " << one.numel() << " elements of " << at::toString(dtype) << ", rank " << rank;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, SumsByHostsTest, ::testing::ValuesIn(kWorlds),
                         [](const auto& made) { return NameOf(made.param); });

}  // namespace
}  // namespace sirtaki::tests::conformance
