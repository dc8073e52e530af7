#include "launch/base/greeting.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/hmac.h"

namespace sirtaki::launch {
namespace {

using std::chrono::seconds;

const std::string kKey = "00112233445566778899aabbccddeeff";
const std::string kHere = "10.0.0.1:4711";

bool AwaitTrue(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

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
  // What is said for a message that came to this address, until it is empty; none: nothing is ever
  // said.
  using Answer = std::function<std::string(const RankMessage&, const std::string& address)>;

  // The first `drops` connections are closed when they prove something.
  explicit Listener(Answer answer, int drops = 0) : answer_(std::move(answer)), drops_(drops) {
    const auto take = [this](std::optional<Link> link) { Add(*std::move(link)); };
    EXPECT_TRUE(loop_.Listen(/*local=*/true, take, &port_).ok());
    thread_ = std::thread([this] {
      while (!ends_) loop_.Run(core::Clock::now() + std::chrono::milliseconds(10));
    });
  }
  ~Listener() { End(); }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  int drops() const { return drops_; }
  int ended() const { return ended_; }  // connections, by the other end
  // All that came.
  const std::string& heard() {
    End();
    return heard_;
  }

 private:
  void End() {
    ends_ = true;
    if (thread_.joinable()) thread_.join();
  }
  void Add(Link accepted) {
    Link* const link = &held_.emplace_back(std::move(accepted));
    link->Hear([this, link](const RankMessage& message) { return Hear(link, message); },
               [this](const core::Status&) { ++ended_; });
  }
  bool Hear(Link* link, const RankMessage& message) {
    heard_ += Encode(message);
    if (drops_ > 0 && std::holds_alternative<ProofMessage>(message)) {
      --drops_;
      return false;
    }
    if (answer_) link->Send(answer_(message, link->own_end()));
    return true;
  }

  const Answer answer_;
  Loop loop_;
  int port_ = 0;
  std::atomic<int> drops_;
  std::atomic<int> ended_{0};
  std::atomic<bool> ends_{false};
  std::deque<Link> held_;
  std::string heard_;
  std::thread thread_;
};

// The answers of a sirtakirun whose run has this key; `address` is where it thinks that it is, if not
// where it is.
Listener::Answer WithKey(const std::string& key, const std::string& address = "") {
  return [key, address, keeper = std::make_shared<Doorkeeper>("", "")](const RankMessage& message,
                                                                       const std::string& own) {
    std::string reply;
    if (std::holds_alternative<ChallengeMessage>(message)) {
      *keeper = Doorkeeper(key, address.empty() ? own : address);
    }
    keeper->Take(message, &reply);
    return reply;
  };
}

TEST(GreetingTest, BothEndsThatKnowTheKeyGetToKnowEachOther) {
  const Caller rank(kKey, kHere);
  Doorkeeper door(kKey, kHere);
  std::string reply;
  ASSERT_TRUE(door.Take(MessageIn(rank.Opening()), &reply));
  EXPECT_FALSE(door.knows());
  std::string proof;
  ASSERT_TRUE(rank.Take(MessageIn(reply), &proof).ok());
  EXPECT_TRUE(door.Take(MessageIn(proof), &reply));
  EXPECT_TRUE(door.knows());
  EXPECT_EQ(MessageIn(reply), RankMessage(WelcomeMessage{}));
}

TEST(GreetingTest, TheKeyNeverCrossesTheConnection) {
  const Caller rank(kKey, kHere);
  Doorkeeper door(kKey, kHere);
  std::string said;
  std::string proof;
  ASSERT_TRUE(door.Take(MessageIn(rank.Opening()), &said));
  ASSERT_TRUE(rank.Take(MessageIn(said), &proof).ok());
  EXPECT_EQ((rank.Opening() + said + proof).find(kKey), std::string::npos);
  EXPECT_LE(said.size(), kMaxGreeting);
  EXPECT_LE(proof.size(), kMaxGreeting);
}

TEST(GreetingTest, ARankWithoutTheKeyIsRefusedAndToldNothing) {
  const Caller stranger("another key", kHere);
  Doorkeeper door(kKey, kHere);
  std::string reply;
  ASSERT_TRUE(door.Take(MessageIn(stranger.Opening()), &reply));
  std::string nothing;
  EXPECT_FALSE(stranger.Take(MessageIn(reply), &nothing).ok());  // nor does it trust sirtakirun
  EXPECT_FALSE(door.Take(ProofMessage{std::string(32, 'x')}, &nothing));
  EXPECT_FALSE(door.knows());
  EXPECT_EQ(nothing, "");
}

TEST(GreetingTest, NothingElseIsHeardBefore) {
  const std::vector<RankMessage> others = {HelloMessage{0, 1, 0, "host", 1}, StopMessage{},
                                           GoMessage{"10.0.0.1", 1, "0"}, ProofMessage{""},
                                           AnswerMessage{std::string(32, 'x'), ""}};
  for (const RankMessage& message : others) {
    std::string reply;
    Doorkeeper door(kKey, kHere);
    EXPECT_FALSE(door.Take(message, &reply)) << message.index();
    EXPECT_FALSE(Caller(kKey, kHere).Take(message, &reply).ok()) << message.index();
    EXPECT_EQ(reply, "");
  }
}

TEST(GreetingTest, OneSidesProofIsNotTheOthers) {
  const Caller rank(kKey, kHere);
  Doorkeeper door(kKey, kHere);
  std::string reply;
  ASSERT_TRUE(door.Take(MessageIn(rank.Opening()), &reply));
  const auto answer = std::get<AnswerMessage>(MessageIn(reply));
  EXPECT_FALSE(door.Take(ProofMessage{answer.proof}, &reply));
}

TEST(GreetingTest, AChallengeIsAnsweredOnce) {
  const Caller rank(kKey, kHere);
  Doorkeeper door(kKey, kHere);
  std::string reply;
  EXPECT_TRUE(door.Take(MessageIn(rank.Opening()), &reply));
  EXPECT_FALSE(door.Take(MessageIn(rank.Opening()), &reply));
}

TEST(GreetingTest, WhatWasRecordedIsOfNoUseLater) {
  const Caller rank(kKey, kHere);
  Doorkeeper door(kKey, kHere);
  std::string answer;
  std::string proof;
  ASSERT_TRUE(door.Take(MessageIn(rank.Opening()), &answer));
  ASSERT_TRUE(rank.Take(MessageIn(answer), &proof).ok());
  // A stranger says the rank's words again,
  Doorkeeper again(kKey, kHere);
  std::string reply;
  ASSERT_TRUE(again.Take(MessageIn(rank.Opening()), &reply));
  EXPECT_FALSE(again.Take(MessageIn(proof), &reply));
  EXPECT_FALSE(again.knows());
  // or sirtakirun's.
  EXPECT_FALSE(Caller(kKey, kHere).Take(MessageIn(answer), &reply).ok());
}

TEST(GreetingTest, ANextAddressIsTakenWhereOneSaysNothing) {
  Listener silent(nullptr);
  Listener good(WithKey(kKey));
  Loop loop;
  Link there;
  const core::Status status =
      ConnectToAny(&loop, silent.address() + "," + good.address(), kKey, seconds(60), &there);
  ASSERT_TRUE(status.ok()) << status.ToString();
}

TEST(GreetingTest, ANextAddressIsTakenWhereOneDoesNotKnowTheKey) {
  Listener stranger(WithKey("another key"));
  Listener babbler([](const RankMessage&, const std::string&) {
    return std::string("HTTP/1.1 400 Bad Request\r\n");
  });
  Listener good([&, answer = WithKey(kKey)](const RankMessage& message, const std::string& own) {
    EXPECT_TRUE(AwaitTrue([&] { return stranger.ended() > 0 && babbler.ended() > 0; }));
    return answer(message, own);
  });
  Loop loop;
  Link there;
  const core::Status status =
      ConnectToAny(&loop, stranger.address() + "," + babbler.address() + "," + good.address(), kKey,
                   seconds(100), &there);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(stranger.heard().find(kKey), std::string::npos);
  // It was sent a challenge and nothing more.
  EXPECT_EQ(stranger.heard().size(), Caller(kKey, kHere).Opening().size());
}

TEST(GreetingTest, WhatIsPassedOnFromAnotherAddressIsRefused) {
  const Caller rank(kKey, "10.0.0.2:4711");  // a stranger's, who asks sirtakirun what to say
  Doorkeeper door(kKey, kHere);
  std::string answer;
  std::string proof;
  ASSERT_TRUE(door.Take(MessageIn(rank.Opening()), &answer));
  const core::Status status = rank.Take(MessageIn(answer), &proof);
  EXPECT_EQ(status.message(),
            "it does not know the run's key, or passes on what another address says");
  EXPECT_EQ(proof, "");
}

TEST(GreetingTest, ARanksProofIsForTheAddressThatItHasDialled) {
  const auto proof_for = [](const std::string& address, const std::string& of_rank,
                            const std::string& of_launcher) {
    const core::Hash hash = core::HmacSha256(kKey, "rank:" + address + of_rank + of_launcher);
    return ProofMessage{{hash.begin(), hash.end()}};
  };
  for (const std::string& dialled : {kHere, std::string("10.0.0.2:4711")}) {
    const Caller rank(kKey, dialled);
    Doorkeeper door(kKey, kHere);
    const auto opening = std::get<ChallengeMessage>(MessageIn(rank.Opening()));
    std::string reply;
    ASSERT_TRUE(door.Take(opening, &reply));
    const auto answer = std::get<AnswerMessage>(MessageIn(reply));
    EXPECT_EQ(door.Take(proof_for(dialled, opening.challenge, answer.challenge), &reply),
              dialled == kHere);
  }
}

TEST(GreetingTest, AConnectionThatIsPassedOnIsRefused) {
  Listener relay(WithKey(kKey, kHere));
  Loop loop;
  Link there;
  const core::Status status = ConnectToAny(&loop, relay.address(), kKey, seconds(60), &there);
  EXPECT_EQ(status.code(), core::StatusCode::kBackend);
  EXPECT_EQ(status.message(), relay.address() +
                                  ": not this run's sirtakirun: it does not know the run's key, or "
                                  "passes on what another address says");
  EXPECT_FALSE(there.is_open());
}

TEST(GreetingTest, ARankThatWasDroppedBeforeItWasKnownBeginsAgain) {
  Listener busy(WithKey(kKey), /*drops=*/3);
  Loop loop;
  Link there;
  const core::Status status = ConnectToAny(&loop, busy.address(), kKey, seconds(60), &there);
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(busy.drops(), 0);
}

TEST(GreetingTest, SaysThatOneSaysNothing) {
  Listener silent(nullptr);
  Loop loop;
  Link there;
  const core::Status status =
      ConnectToAny(&loop, silent.address(), kKey, std::chrono::milliseconds(50), &there);
  EXPECT_EQ(status.code(), core::StatusCode::kTimedOut);
  EXPECT_EQ(status.message(), silent.address() + ": no answer");
  EXPECT_FALSE(there.is_open());
}

TEST(GreetingTest, SaysThatOneDoesNotKnowTheKey) {
  Listener stranger(WithKey("another key"));
  Loop loop;
  Link there;
  const core::Status status = ConnectToAny(&loop, stranger.address(), kKey, seconds(60), &there);
  EXPECT_EQ(status.code(), core::StatusCode::kBackend);
  EXPECT_EQ(status.message(), stranger.address() +
                                  ": not this run's sirtakirun: it does not know the run's key, or "
                                  "passes on what another address says");
  EXPECT_FALSE(there.is_open());
}

TEST(GreetingTest, SaysWhyNoneAnswers) {
  const std::string closed = "127.0.0.1:" + std::to_string(FreePort());
  Loop loop;
  Link there;
  const core::Status status = ConnectToAny(&loop, closed + ",x", kKey, seconds(60), &there);
  EXPECT_EQ(status.code(), core::StatusCode::kBackend);
  EXPECT_NE(status.message().find(closed + ": Connection refused"), std::string::npos)
      << status.message();
  EXPECT_NE(status.message().find("x: is not an address"), std::string::npos) << status.message();
  EXPECT_FALSE(there.is_open());
}

}  // namespace
}  // namespace sirtaki::launch
