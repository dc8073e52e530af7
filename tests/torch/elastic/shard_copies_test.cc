#include "sirtaki/detail/shard_copies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "sirtaki/session.h"
#include "tests/support/test_scale.h"
#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using detail::PartnerOf;
using detail::ShardCopies;

const std::vector<int> kTwoHosts = {0, 0, 1, 1};

ShardCopies::Shards ShardsAt(int place, int of_rank) {
  return {"shard " + std::to_string(of_rank) + " at " + std::to_string(place), "second"};
}

// The copies of four ranks that have come to this place.
std::vector<ShardCopies> Kept(int place, std::vector<ShardCopies> copies = {},
                              const std::vector<int>& hosts = kTwoHosts) {
  copies.resize(hosts.size());
  RunTorchRanks(
      static_cast<int>(hosts.size()),
      [&](int rank) {
        copies[static_cast<std::size_t>(rank)].Keep(place, ShardsAt(place, rank),
                                                    /*to_partner=*/true);
      },
      {}, hosts);
  return copies;
}

TEST(ShardCopiesTest, PartnersAreOnOtherHostsAndShareTheLoad) {
  const auto partners = [](const std::vector<int>& hosts) {
    std::vector<int> all;
    for (std::size_t i = 0; i < hosts.size(); ++i)
      all.push_back(PartnerOf(static_cast<int>(i), hosts));
    return all;
  };
  using testing::ElementsAre;
  EXPECT_THAT(partners({0}), ElementsAre(0));
  EXPECT_THAT(partners({0, 0, 0}), ElementsAre(1, 2, 0));
  EXPECT_THAT(partners(kTwoHosts), ElementsAre(2, 3, 0, 1));
  EXPECT_THAT(partners({0, 0, 1}), ElementsAre(2, 2, 0));
  EXPECT_THAT(partners({0, 1, 2, 0, 1, 2}), ElementsAre(1, 2, 0, 4, 5, 3));
  EXPECT_EQ(PartnerOf(1, kTwoHosts, {1, 3}), 2);
  EXPECT_EQ(PartnerOf(1, kTwoHosts, {1, 2, 3}), 0);
  EXPECT_EQ(PartnerOf(0, kTwoHosts, {1, 2, 3}), 0);
  const std::uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    std::vector<int> hosts(std::uniform_int_distribution<std::size_t>(1, 12)(random));
    for (int& host : hosts) host = std::uniform_int_distribution<int>(0, 3)(random);
    const bool several =
        std::any_of(hosts.begin(), hosts.end(), [&](int host) { return host != hosts.front(); });
    const std::vector<int> all = partners(hosts);
    for (std::size_t i = 0; i < hosts.size(); ++i) {
      const auto partner = static_cast<std::size_t>(all[i]);
      EXPECT_TRUE(several ? hosts[partner] != hosts[i] : hosts.size() == 1 || partner != i)
          << "seed " << seed;
      for (const int other :
           all) {  // copies of a host's ranks are shared out among all of the others'
        const auto of_host = [&](int rank) {
          std::ptrdiff_t count = 0;
          for (std::size_t j = 0; j < hosts.size(); ++j)
            count += hosts[j] == hosts[i] && all[j] == rank;
          return count;
        };
        for (int rank = 0; several && rank < static_cast<int>(hosts.size()); ++rank) {
          if (hosts[static_cast<std::size_t>(rank)] == hosts[i]) continue;
          EXPECT_LE(of_host(other), of_host(rank) + 1) << "seed " << seed;
        }
      }
    }
  }
}

TEST(ShardCopiesTest, ShardsHaveNumbersByHostWhereHostsAreAlike) {
  using detail::NumbersByHost;
  using testing::ElementsAre;
  EXPECT_THAT(NumbersByHost({0, 0, 1, 1}), ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(NumbersByHost({0, 1, 0, 1, 2, 2}), ElementsAre(0, 0, 1, 1, 0, 1));
  EXPECT_THAT(NumbersByHost({0, 0, 1}), ElementsAre());
  EXPECT_THAT(NumbersByHost({0, 0}), ElementsAre());
}

// These shards look as those of ShardOver::Host do.
ShardCopies::Shards OnEachHost(const std::string& text) {
  return {ShardCopies::kOfEachHost + text};
}

TEST(ShardCopiesTest, ShardsThatEachHostHasAreNotCopied) {
  std::vector<ShardCopies> copies(4);
  RunTorchRanks(
      4,
      [&](int rank) {
        ShardCopies& mine = copies[static_cast<std::size_t>(rank)];
        mine.Keep(3, OnEachHost(std::string(1000, 'x')), /*to_partner=*/true);
        EXPECT_LT(mine.bytes(), 1100);
        mine.Keep(4, OnEachHost("of " + std::to_string(rank % 2)), /*to_partner=*/true);
      },
      {}, kTwoHosts);
  // One of each host is lost, and the others have all of it.
  const auto expect_all = [](ShardCopies& mine) {
    const auto boundary = mine.Agree(4);
    EXPECT_EQ(boundary.place, 4);
    ASSERT_EQ(boundary.shards, 2);
    EXPECT_EQ(mine.Receive(0), ShardCopies::Shards({ShardCopies::kOfJob + std::string("of 0")}));
    EXPECT_EQ(mine.Receive(1), ShardCopies::Shards({ShardCopies::kOfJob + std::string("of 1")}));
  };
  std::vector<ShardCopies> left = {copies[1], copies[2]};
  RunTorchRanks(2, [&](int rank) { expect_all(left[static_cast<std::size_t>(rank)]); });
  left = {copies[0], copies[2]};
  RunTorchRanks(2, [&](int rank) {
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument, [&] { left[static_cast<std::size_t>(rank)].Agree(4); }),
        testing::HasSubstr("nobody is left that has those of rank 1 of 2"));
  });
}

// Hosts with different numbers of ranks cut the state in different ways.
TEST(ShardCopiesTest, ShardsOfEachHostAreCopiedWhereHostsDiffer) {
  std::vector<ShardCopies> copies(3);
  RunTorchRanks(3,
                [&](int rank) {
                  copies[static_cast<std::size_t>(rank)].Keep(3, OnEachHost(std::to_string(rank)),
                                                              /*to_partner=*/true);
                },
                {}, {0, 0, 1});
  std::vector<ShardCopies> left = {copies[0], copies[2]};
  RunTorchRanks(2, [&](int rank) {
    ShardCopies& mine = left[static_cast<std::size_t>(rank)];
    ASSERT_EQ(mine.Agree(3).shards, 3);
    EXPECT_EQ(mine.Receive(1), ShardCopies::Shards({ShardCopies::kOfJob + std::string("1")}));
    EXPECT_EQ(mine.Receive(2), ShardCopies::Shards({ShardCopies::kAgain + std::string("2")}));
  });
}

TEST(ShardCopiesTest, AHostThatIsLostTakesNothingWithIt) {
  std::vector<ShardCopies> copies = Kept(3);
  copies = {copies[2], ShardCopies(), copies[3]};  // the second one has come
  RunTorchRanks(3, [&](int rank) {
    ShardCopies& mine = copies[static_cast<std::size_t>(rank)];
    const auto boundary = mine.Agree(rank == 1 ? 0 : 3);
    EXPECT_EQ(boundary.place, 3);
    EXPECT_EQ(boundary.root, 0);
    ASSERT_EQ(boundary.shards, 4);
    for (int shard = 0; shard < 4; ++shard) EXPECT_EQ(mine.Receive(shard), ShardsAt(3, shard));
  });
}

// One rank has come through a commit that another one was lost in.
TEST(ShardCopiesTest, ABoundaryWinsOnlyIfEachShardOfItIsThere) {
  const std::vector<ShardCopies> before = Kept(3);
  const std::vector<ShardCopies> after = Kept(4, before);
  std::vector<ShardCopies> copies = {after[0], before[1]};
  RunTorchRanks(2, [&](int rank) {
    ShardCopies& mine = copies[static_cast<std::size_t>(rank)];
    const auto boundary = mine.Agree(rank == 0 ? 4 : 3);
    EXPECT_EQ(boundary.place, 3);
    EXPECT_EQ(boundary.root, 1);
    ASSERT_EQ(boundary.shards, 4);
    for (int shard = 0; shard < 4; ++shard) EXPECT_EQ(mine.Receive(shard), ShardsAt(3, shard));
  });
  copies = {after[0], after[1]};
  RunTorchRanks(2, [&](int rank) {
    ShardCopies& mine = copies[static_cast<std::size_t>(rank)];
    EXPECT_EQ(mine.Agree(4).place, 4);
    EXPECT_EQ(mine.Receive(3), ShardsAt(4, 3));
  });
}

TEST(ShardCopiesTest, WithoutAShardAllRanksThrow) {
  std::vector<ShardCopies> copies = Kept(3, {}, {0, 0, 0, 0});
  copies = {copies[0], copies[3]};  // rank 2 had the copy of rank 1
  RunTorchRanks(2, [&](int rank) {
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument,
                [&] { copies[static_cast<std::size_t>(rank)].Agree(3); }),
        testing::HasSubstr("nobody is left that has those of rank 1 of 4. Go on from the last"));
  });
}

TEST(ShardCopiesTest, ARankThatHasComeIsNotTheBeginningOfTheTraining) {
  std::vector<ShardCopies> copies = Kept(3, {}, {0, 0, 0, 0});
  copies = {copies[0], ShardCopies()};
  RunTorchRanks(2, [&](int rank) {
    EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument,
                        [&] { copies[static_cast<std::size_t>(rank)].Agree(rank == 0 ? 3 : 0); }),
                testing::HasSubstr("nobody is left that has those of rank 1, 2 of 4"));
  });
}

// It is lost with all others' copies before it has kept its own.
TEST(ShardCopiesTest, ARankThatHasReceivedKnowsThatTheStateWasCut) {
  std::vector<ShardCopies> copies = Kept(3);
  copies = {copies[0], copies[1], ShardCopies()};
  RunTorchRanks(3, [&](int rank) {
    ShardCopies& mine = copies[static_cast<std::size_t>(rank)];
    EXPECT_EQ(mine.Agree(rank == 2 ? 0 : 3).shards, 4);
    EXPECT_EQ(mine.Mine().empty(), rank == 2);
  });
  RunTorchRanks(1, [&](int) {
    const auto error_at = [&](int place) {
      return ErrorOf(ErrorCode::InvalidArgument, [&] { copies[2].Agree(place); });
    };
    EXPECT_THAT(error_at(3), testing::HasSubstr("has those of rank 0, 1, 2, 3 of 4"));
    // It has not received all else either.
    EXPECT_THAT(error_at(0), testing::HasSubstr("nobody is left that has the rest of the state"));
  });
}

TEST(ShardCopiesTest, TwoBoundariesAreKeptUntilTheLastIsConfirmed) {
  std::vector<ShardCopies> copies(4);
  RunTorchRanks(
      4,
      [&](int rank) {
        ShardCopies& mine = copies[static_cast<std::size_t>(rank)];
        EXPECT_EQ(mine.Mine(), ShardCopies::Shards());
        std::vector<std::int64_t> bytes;
        for (int place = 1; place <= 3; ++place) {
          mine.Keep(place, ShardsAt(place, rank), /*to_partner=*/true);
          bytes.push_back(mine.bytes());
        }
        EXPECT_EQ(bytes[1], 2 * bytes[0]);
        EXPECT_EQ(bytes[2], 2 * bytes[0]);
        mine.Confirm();
        EXPECT_EQ(mine.bytes(), bytes[0]);
        EXPECT_EQ(mine.Mine(), ShardsAt(3, rank));
        mine.Keep(4, ShardsAt(4, rank), /*to_partner=*/false);
        mine.Confirm();
        EXPECT_EQ(mine.bytes(), bytes[0] / 2);
      },
      {}, kTwoHosts);
}

TEST(ShardCopiesTest, StateThatIsWholeComesFromTheFarthestRank) {
  std::vector<ShardCopies> copies(2);
  RunTorchRanks(2, [&](int rank) {
    ShardCopies& mine = copies[static_cast<std::size_t>(rank)];
    const auto first = mine.Agree(0);
    EXPECT_EQ(first.place, 0);
    EXPECT_EQ(first.root, 0);
    EXPECT_EQ(first.shards, 0);
    mine.Keep(5, {"", ""}, /*to_partner=*/true);
    EXPECT_EQ(mine.bytes(), 0);
  });
  copies = {ShardCopies(), copies[0]};
  RunTorchRanks(2, [&](int rank) {
    const auto second = copies[static_cast<std::size_t>(rank)].Agree(rank == 0 ? 0 : 5);
    EXPECT_EQ(second.place, 5);
    EXPECT_EQ(second.root, 1);
    EXPECT_EQ(second.shards, 0);
  });
}

}  // namespace
}  // namespace sirtaki::tests
