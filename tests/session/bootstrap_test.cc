// What the ranks tell each other at init.
#include "session/bootstrap.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace sirtaki::session {
namespace {

using core::Status;
using core::StatusCode;

Greeting Sample() {
  Greeting greeting;
  greeting.status = Status(StatusCode::kInvalidArgument, "wrong");
  greeting.config.tree_arity = 5;
  greeting.cpus = {{0, 1, 2, 7}, 2.5};
  greeting.token = 0x123456789ABCDEF0;
  return greeting;
}

TEST(BootstrapTest, AGreetingSurvivesTheTrip) {
  const Greeting sent = Sample();
  Greeting read;
  ASSERT_TRUE(Deserialize(Serialize(sent), &read).ok());
  EXPECT_EQ(read.status, sent.status);
  EXPECT_EQ(read.config, sent.config);
  EXPECT_EQ(read.cpus, sent.cpus);
  EXPECT_EQ(read.token, sent.token);
}

TEST(BootstrapTest, DamagedGreetingsAreRefusedOrHarmless) {
  const std::string good = Serialize(Sample());
  std::mt19937 random(5);
  Greeting read;
  for (std::size_t length = 0; length < good.size(); ++length) {
    EXPECT_FALSE(Deserialize(good.substr(0, length), &read).ok());
  }
  for (int i = 0; i < 2000; ++i) {
    std::string bad = good;
    for (int j = 0; j < 3; ++j) bad[random() % bad.size()] = static_cast<char>(random());
    static_cast<void>(Deserialize(bad, &read));
  }
}

TEST(BootstrapTest, TheFirstFailureNamesItsRank) {
  const Status ok;
  const Status bad(StatusCode::kInvalidArgument, "bad");
  const Status worse(StatusCode::kUnsupported, "worse");
  EXPECT_TRUE(FirstFailure(std::vector<Status>{ok, ok}).ok());
  const Status first = FirstFailure(std::vector<Status>{ok, bad, worse});
  EXPECT_EQ(first.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(first.message(), "rank 1 cannot start: bad");
  EXPECT_EQ(first.origin().rank, 1);
}

TEST(BootstrapTest, WhatAllRanksSayIsSaidOnce) {
  const Status bad(StatusCode::kInvalidArgument, "bad");
  EXPECT_EQ(FirstFailure(std::vector<Status>{bad, bad}).message(), "bad");
}

TEST(BootstrapTest, StatusesTravelAsText) {
  const std::vector<std::string> told = {SerializeStatus(Status::Ok()),
                                         SerializeStatus(Status(StatusCode::kBackend, "no room"))};
  EXPECT_EQ(FirstFailure(told).message(), "rank 1 cannot start: no room");
  EXPECT_FALSE(FirstFailure(std::vector<std::string>{"", told[0]}).ok());
}

}  // namespace
}  // namespace sirtaki::session
