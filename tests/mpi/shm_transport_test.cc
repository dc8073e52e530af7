// RANKS: 2 3 4
// The transport through shared memory keeps what core/protocol/transport.h promises between
// processes, also where a part of the ranks is beyond its reach.
#include "ops/shm/transport.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mpi/communicators.h"
#include "mpi/environment.h"
#include "mpi/transport.h"
#include "ops/shm/local_group.h"
#include "tests/support/mpi_main.h"
#include "tests/support/transport_conformance.h"

namespace sirtaki::mpi {
namespace {

using core::Bytes;
using core::Clock;
using core::Incoming;
using core::Status;
using ops::shm::LocalGroup;

// The ranks pretend to be on as many hosts as the parameter says.
class ShmTransportTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
    Status status = Environment::Start({}, deadline, &environment_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    status = Communicators::Make(*environment_, deadline, &communicators_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    beyond_ = std::make_unique<Transport>(*communicators_);

    ops::shm::LocalGroupOptions options;
    options.rank = rank();
    std::string mine;
    status = LocalGroup::Make(options, &group_, &mine);
    ASSERT_TRUE(status.ok()) << status.ToString();
    std::vector<std::string> all;
    status = environment_->Exchange(mine, deadline, &all);
    ASSERT_TRUE(status.ok()) << status.ToString();
    core::RankRanges here;
    std::vector<std::string> announcements;
    for (int other = rank() % GetParam(); other < size(); other += GetParam()) {
      here.Add(other);
      announcements.push_back(all[static_cast<std::size_t>(other)]);
    }
    status = group_->Join(here, announcements);
    EXPECT_TRUE(status.ok()) << status.ToString();
    ASSERT_TRUE(tests::TrueOnAllRanks(status.ok()));  // all have opened what they need
    transport_ = std::make_unique<ops::shm::Transport>(
        *group_, *beyond_, GetParam() > 1 ? ops::shm::Beyond::kMessages : ops::shm::Beyond::kNone);
  }

  int rank() const { return communicators_->rank(); }
  int size() const { return communicators_->size(); }

  std::unique_ptr<Environment> environment_;
  std::unique_ptr<Communicators> communicators_;
  std::unique_ptr<core::Transport> beyond_;
  std::unique_ptr<LocalGroup> group_;
  std::unique_ptr<core::Transport> transport_;
};

INSTANTIATE_TEST_SUITE_P(Hosts, ShmTransportTest, testing::Values(1, 2));

TEST_P(ShmTransportTest, Conforms) {
  tests::TransportConformance conformance(*transport_, rank(), size());
  for (const tests::TransportCheck& check : tests::kTransportChecks) {
    SCOPED_TRACE(check.name);
    (conformance.*check.run)();
  }
}

// Its process may have ended before anybody looks.
TEST_P(ShmTransportTest, WhatWasFlushedArrivesAfterItsSenderHasGone) {
  const int last = size() - 1;
  if (rank() == last) {
    transport_->Send(0, Bytes(7));
    const core::TimePoint limit = Clock::now() + std::chrono::seconds(30);
    while (!transport_->Flush() && Clock::now() < limit) {
    }
    if (group_->IndexOf(0) >= 0) {
      transport_.reset();
      group_.reset();
    }
  }
  ASSERT_TRUE(tests::TrueOnAllRanks(true));
  if (rank() != 0) return;
  std::optional<Incoming> incoming;
  const core::TimePoint limit = Clock::now() + std::chrono::seconds(30);
  while (!incoming && Clock::now() < limit) incoming = transport_->TryReceive();
  ASSERT_TRUE(incoming.has_value());
  EXPECT_EQ(incoming->from, last);
  EXPECT_EQ(incoming->bytes.size(), 7U);
}

}  // namespace
}  // namespace sirtaki::mpi
