#include "launch/base/greeting.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

namespace sirtaki::launch {
namespace {

using std::chrono::seconds;

const std::string kKey = "00112233445566778899aabbccddeeff";

RankMessage MessageIn(const std::string& frame) {
  MessageReader reader;
  reader.Append(frame);
  std::optional<RankMessage> message;
  EXPECT_TRUE(reader.Next(&message).ok());
  return message.value();
}

// A port of the loopback on which one connection after the other is answered until the end.
class Listener {
 public:
  // What is said for a message, until it is empty; none: nothing is ever said.
  using Answer = std::function<std::string(const RankMessage&)>;

  // The first `drops` connections are closed when they prove something.
  explicit Listener(Answer answer, int drops = 0) : answer_(std::move(answer)), drops_(drops) {
    EXPECT_TRUE(Listen(/*local=*/true, &listener_, &port_).ok());
    thread_ = std::thread([this] { Run(); });
  }
  ~Listener() {
    ends_ = true;
    thread_.join();
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  int drops() const { return drops_; }
  // All that came.
  const std::string& heard() {
    ends_ = true;
    if (thread_.joinable()) thread_.join();
    thread_ = std::thread([] {});
    return heard_;
  }

 private:
  void Run() {
    std::vector<Descriptor> held;
    while (!ends_) {
      pollfd ready{listener_.get(), POLLIN, 0};
      poll(&ready, 1, 10);
      for (Descriptor fd = Accept(listener_); fd.valid(); fd = Accept(listener_)) {
        held.push_back(std::move(fd));
        readers_.emplace_back();
      }
      for (std::size_t i = 0; i < held.size(); ++i) Serve(held[i], &readers_[i]);
    }
  }
  void Serve(Descriptor& fd, MessageReader* reader) {
    if (!fd.valid()) return;
    std::string bytes;
    ReadSome(fd.get(), &bytes);
    heard_ += bytes;
    reader->Append(bytes);
    std::optional<RankMessage> message;
    while (reader->Next(&message).ok() && message) {
      if (drops_ > 0 && std::holds_alternative<ProofMessage>(*message)) {
        --drops_;
        return fd.Close();
      }
      if (answer_) WriteSome(fd.get(), answer_(*message));
    }
  }

  const Answer answer_;
  Descriptor listener_;
  int port_ = 0;
  std::atomic<int> drops_;
  std::atomic<bool> ends_{false};
  std::vector<MessageReader> readers_;
  std::string heard_;
  std::thread thread_;
};

// The answers of a sirtakirun whose run has this key.
Listener::Answer WithKey(const std::string& key) {
  return [key, keeper = std::make_shared<Doorkeeper>()](const RankMessage& message) {
    std::string reply;
    if (std::holds_alternative<ChallengeMessage>(message)) *keeper = Doorkeeper();
    keeper->Take(message, key, &reply);
    return reply;
  };
}

TEST(GreetingTest, BothEndsThatKnowTheKeyGetToKnowEachOther) {
  const Caller rank(kKey);
  Doorkeeper door;
  std::string reply;
  ASSERT_TRUE(door.Take(MessageIn(rank.Opening()), kKey, &reply));
  EXPECT_FALSE(door.knows());
  std::string proof;
  ASSERT_TRUE(rank.Take(MessageIn(reply), &proof).ok());
  EXPECT_TRUE(door.Take(MessageIn(proof), kKey, &reply));
  EXPECT_TRUE(door.knows());
  EXPECT_EQ(MessageIn(reply), RankMessage(WelcomeMessage{}));
}

TEST(GreetingTest, TheKeyNeverCrossesTheConnection) {
  const Caller rank(kKey);
  Doorkeeper door;
  std::string said;
  std::string proof;
  ASSERT_TRUE(door.Take(MessageIn(rank.Opening()), kKey, &said));
  ASSERT_TRUE(rank.Take(MessageIn(said), &proof).ok());
  EXPECT_EQ((rank.Opening() + said + proof).find(kKey), std::string::npos);
  EXPECT_LE(said.size(), kMaxGreeting);
  EXPECT_LE(proof.size(), kMaxGreeting);
}

TEST(GreetingTest, ARankWithoutTheKeyIsRefusedAndToldNothing) {
  const Caller stranger("another key");
  Doorkeeper door;
  std::string reply;
  ASSERT_TRUE(door.Take(MessageIn(stranger.Opening()), kKey, &reply));
  std::string nothing;
  EXPECT_FALSE(stranger.Take(MessageIn(reply), &nothing).ok());  // nor does it trust sirtakirun
  EXPECT_FALSE(door.Take(ProofMessage{std::string(32, 'x')}, kKey, &nothing));
  EXPECT_FALSE(door.knows());
  EXPECT_EQ(nothing, "");
}

TEST(GreetingTest, NothingElseIsHeardBefore) {
  const std::vector<RankMessage> others = {HelloMessage{0, 1, 0, "host", 1}, StopMessage{},
                                           GoMessage{"10.0.0.1", 1, "0"}, ProofMessage{""},
                                           AnswerMessage{std::string(32, 'x'), ""}};
  for (const RankMessage& message : others) {
    std::string reply;
    Doorkeeper door;
    EXPECT_FALSE(door.Take(message, kKey, &reply)) << message.index();
    EXPECT_FALSE(Caller(kKey).Take(message, &reply).ok()) << message.index();
    EXPECT_EQ(reply, "");
  }
}

TEST(GreetingTest, OneSidesProofIsNotTheOthers) {
  const Caller rank(kKey);
  Doorkeeper door;
  std::string reply;
  ASSERT_TRUE(door.Take(MessageIn(rank.Opening()), kKey, &reply));
  const auto answer = std::get<AnswerMessage>(MessageIn(reply));
  EXPECT_FALSE(door.Take(ProofMessage{answer.proof}, kKey, &reply));
}

TEST(GreetingTest, AChallengeIsAnsweredOnce) {
  const Caller rank(kKey);
  Doorkeeper door;
  std::string reply;
  EXPECT_TRUE(door.Take(MessageIn(rank.Opening()), kKey, &reply));
  EXPECT_FALSE(door.Take(MessageIn(rank.Opening()), kKey, &reply));
}

TEST(GreetingTest, WhatWasRecordedIsOfNoUseLater) {
  const Caller rank(kKey);
  Doorkeeper door;
  std::string answer;
  std::string proof;
  ASSERT_TRUE(door.Take(MessageIn(rank.Opening()), kKey, &answer));
  ASSERT_TRUE(rank.Take(MessageIn(answer), &proof).ok());
  // A stranger says the rank's words again,
  Doorkeeper again;
  std::string reply;
  ASSERT_TRUE(again.Take(MessageIn(rank.Opening()), kKey, &reply));
  EXPECT_FALSE(again.Take(MessageIn(proof), kKey, &reply));
  EXPECT_FALSE(again.knows());
  // or sirtakirun's.
  EXPECT_FALSE(Caller(kKey).Take(MessageIn(answer), &reply).ok());
}

TEST(GreetingTest, ANextAddressIsTakenWhereOneSaysNothing) {
  Listener silent(nullptr);
  Listener good(WithKey(kKey));
  Descriptor there;
  const core::Status status =
      ConnectToAny(silent.address() + "," + good.address(), kKey, seconds(60), &there);
  ASSERT_TRUE(status.ok()) << status.ToString();
}

TEST(GreetingTest, ANextAddressIsTakenWhereOneDoesNotKnowTheKey) {
  Listener stranger(WithKey("another key"));
  Listener babbler([](const RankMessage&) { return std::string("HTTP/1.1 400 Bad Request\r\n"); });
  Listener good(WithKey(kKey));
  Descriptor there;
  const core::Status status =
      ConnectToAny(stranger.address() + "," + babbler.address() + "," + good.address(), kKey,
                   seconds(60), &there);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(stranger.heard().find(kKey), std::string::npos);
  // It was sent a challenge and nothing more.
  EXPECT_LE(stranger.heard().size(), Caller(kKey).Opening().size());
}

TEST(GreetingTest, ARankThatWasDroppedBeforeItWasKnownBeginsAgain) {
  Listener busy(WithKey(kKey), /*drops=*/3);
  Descriptor there;
  const core::Status status = ConnectToAny(busy.address(), kKey, seconds(60), &there);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(busy.drops(), 0);
}

TEST(GreetingTest, SaysWhyNoneIsTaken) {
  Listener silent(nullptr);
  Listener stranger(WithKey("another key"));
  Descriptor there;
  const core::Status status =
      ConnectToAny(silent.address() + "," + stranger.address(), kKey, seconds(1), &there);
  EXPECT_EQ(status.code(), core::StatusCode::kTimedOut);
  EXPECT_NE(status.message().find(silent.address() + ": no answer"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find(stranger.address() +
                                  ": not this run's sirtakirun: it does not know the run's key"),
            std::string::npos)
      << status.message();
  EXPECT_FALSE(there.valid());
}

TEST(GreetingTest, SaysWhyNoneAnswers) {
  const std::string closed = "127.0.0.1:" + std::to_string(FreePort());
  Descriptor there;
  const core::Status status = ConnectToAny(closed + ",x", kKey, seconds(60), &there);
  EXPECT_EQ(status.code(), core::StatusCode::kBackend);
  EXPECT_NE(status.message().find(closed + ": Connection refused"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("x: is not an address"), std::string::npos) << status.message();
  EXPECT_FALSE(there.valid());
}

}  // namespace
}  // namespace sirtaki::launch
