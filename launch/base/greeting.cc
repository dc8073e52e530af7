#include "launch/base/greeting.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/hmac.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

using core::Hash;
using core::HmacSha256;
using core::IsSame;
using core::RandomBytes;
using core::Status;
using core::StatusCode;

namespace {

constexpr std::size_t kChallengeBytes = 32;
// The pause after a connection was closed before sirtakirun knew this rank.
constexpr auto kBeginAgain = std::chrono::milliseconds(100);

// Each side signs other words, so that none can be used to answer the other. Challenges have one
// length, so that no address can be taken for a part of them.
constexpr std::string_view kLauncher = "sirtakirun:";
constexpr std::string_view kRank = "rank:";
std::string Proof(const std::string& key, std::string_view who, const std::string& address,
                  const std::string& of_rank, const std::string& of_launcher) {
  const Hash hash = HmacSha256(key, std::string(who) + address + of_rank + of_launcher);
  return {hash.begin(), hash.end()};
}

// Connections that are being made, all at once.
class Attempts {
 public:
  Attempts(Loop* loop, std::string_view addresses, const std::string& key)
      : loop_(loop), key_(key) {
    for (const std::string_view text : Split(addresses, ',')) {
      attempts_.push_back(std::make_unique<Attempt>(Attempt{std::string(text), Caller(key, {})}));
    }
  }

  Status Wait(core::TimePoint deadline, Link* out) {
    while (failures_.size() < attempts_.size()) {
      const core::TimePoint now = core::Clock::now();
      if (now >= deadline) break;
      core::TimePoint next = deadline;
      for (const auto& attempt : attempts_) {
        if (now >= attempt->begin_at) Begin(attempt.get());
        next = std::min(next, attempt->begin_at);
      }
      if (failures_.size() < attempts_.size()) loop_->Run(next);
      for (const auto& attempt : attempts_) {
        if (!attempt->known || !attempt->link.is_open()) continue;
        *out = std::move(attempt->link);
        return Status::Ok();
      }
    }
    const bool late = failures_.size() < attempts_.size();
    for (const auto& attempt : attempts_) {
      if (!attempt->failed) failures_.push_back(attempt->name + ": " + attempt->last);
    }
    return {late ? StatusCode::kTimedOut : StatusCode::kBackend, Joined(failures_, ", ")};
  }

 private:
  struct Attempt {
    std::string name;
    Caller caller;
    core::TimePoint begin_at;  // max: it has
    bool proven = false;       // both have, as far as this rank knows
    bool known = false;        // sirtakirun knows it
    bool failed = false;
    std::string last = "no answer";
    Link link;
  };

  // Connects, with a challenge of its own each time.
  void Begin(Attempt* attempt) {
    attempt->begin_at = core::TimePoint::max();
    attempt->caller = Caller(key_, attempt->name);
    attempt->proven = attempt->known = false;
    attempt->link.Connect(loop_, attempt->name,
                          [this, attempt](const Status& why) { Open(attempt, why); });
  }

  void Open(Attempt* attempt, const Status& status) {
    if (!status.ok()) return Fail(attempt, status.message());
    const std::string opening = attempt->caller.Opening();
    if (opening.empty()) return Fail(attempt, "the system gives no random numbers");
    attempt->link.Hear(
        [this, attempt](const RankMessage& message) { return Hear(attempt, message); },
        [this, attempt](const Status& why) { End(attempt, why); });
    attempt->link.Send(opening);
  }

  bool Hear(Attempt* attempt, const RankMessage& message) {
    std::string reply;
    Status status;
    if (!attempt->proven) {
      status = attempt->caller.Take(message, &reply);
    } else if (!std::holds_alternative<WelcomeMessage>(message)) {
      status = Status(StatusCode::kProtocol, "it does not say welcome");
    }
    if (!status.ok()) End(attempt, status);
    attempt->known = std::exchange(attempt->proven, true);
    attempt->link.Send(reply);
    return status.ok();
  }

  // It begins again if the connection was closed before sirtakirun knew this rank.
  void End(Attempt* attempt, const Status& why) {
    if (attempt->failed) return;
    if (why.code() == StatusCode::kProtocol) {
      return Fail(attempt, "not this run's sirtakirun: " + why.message());
    }
    attempt->last = why.ok() ? "closed the connection" : why.message();
    attempt->begin_at = core::Clock::now() + kBeginAgain;
  }

  void Fail(Attempt* attempt, const std::string& why) {
    attempt->failed = true;
    attempt->link.Close();
    failures_.push_back(attempt->name + ": " + why);
  }

  Loop* const loop_;
  const std::string key_;
  std::vector<std::unique_ptr<Attempt>> attempts_;
  std::vector<std::string> failures_;
};

}  // namespace

Caller::Caller(std::string key, std::string address)
    : key_(std::move(key)),
      address_(std::move(address)),
      challenge_(RandomBytes(kChallengeBytes)) {}

std::string Caller::Opening() const {
  return challenge_.empty() ? "" : Encode(ChallengeMessage{challenge_});
}

Status Caller::Take(const RankMessage& message, std::string* reply) const {
  const auto* answer = std::get_if<AnswerMessage>(&message);
  if (answer == nullptr) return {StatusCode::kProtocol, "it does not answer the challenge"};
  if (answer->challenge.size() != kChallengeBytes ||
      !IsSame(answer->proof, Proof(key_, kLauncher, address_, challenge_, answer->challenge))) {
    return {StatusCode::kProtocol,
            "it does not know the run's key, or passes on what another address says"};
  }
  *reply = Encode(ProofMessage{Proof(key_, kRank, address_, challenge_, answer->challenge)});
  return Status::Ok();
}

Doorkeeper::Doorkeeper(std::string key, std::string address)
    : key_(std::move(key)), address_(std::move(address)) {}

bool Doorkeeper::Take(const RankMessage& message, std::string* reply) {
  reply->clear();
  if (const auto* opening = std::get_if<ChallengeMessage>(&message)) {
    if (!ours_.empty() || opening->challenge.size() != kChallengeBytes) return false;
    theirs_ = opening->challenge;
    ours_ = RandomBytes(kChallengeBytes);
    if (ours_.empty()) return false;
    *reply = Encode(AnswerMessage{ours_, Proof(key_, kLauncher, address_, theirs_, ours_)});
    return true;
  }
  const auto* proof = std::get_if<ProofMessage>(&message);
  knows_ = proof != nullptr && !ours_.empty() && !key_.empty() && !address_.empty() &&
           IsSame(proof->proof, Proof(key_, kRank, address_, theirs_, ours_));
  if (knows_) *reply = Encode(WelcomeMessage{});
  return knows_;
}

Status ConnectToAny(Loop* loop, std::string_view addresses, const std::string& key,
                    core::Duration timeout, Link* out) {
  return Attempts(loop, addresses, key).Wait(core::Clock::now() + timeout, out);
}

std::string RandomKey() {
  std::string key = RandomBytes(32);
  for (char& letter : key) letter = static_cast<char>('a' + (letter & 0xF));
  return key;
}

}  // namespace sirtaki::launch
