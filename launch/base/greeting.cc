#include "launch/base/greeting.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "launch/base/hmac.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

constexpr std::size_t kChallengeBytes = 32;
// The pause after a connection was closed before sirtakirun knew this rank.
constexpr auto kBeginAgain = std::chrono::milliseconds(100);

// Each side signs other words, so that none can be used to answer the other. Challenges have one
// length, so that no address can be taken for a part of them.
std::string Proof(const std::string& key, std::string_view who, const std::string& address,
                  const std::string& of_rank, const std::string& of_launcher) {
  const Hash hash = HmacSha256(key, std::string(who) + address + of_rank + of_launcher);
  return {hash.begin(), hash.end()};
}

std::string ProofOfLauncher(const std::string& key, const std::string& address,
                            const std::string& of_rank, const std::string& of_launcher) {
  return Proof(key, "sirtakirun:", address, of_rank, of_launcher);
}

std::string ProofOfRank(const std::string& key, const std::string& address,
                        const std::string& of_rank, const std::string& of_launcher) {
  return Proof(key, "rank:", address, of_rank, of_launcher);
}

// Connections that are being made, all at once.
class Attempts {
 public:
  Attempts(std::string_view addresses, const std::string& key) {
    for (const std::string_view text : Split(addresses, ',')) {
      Attempt attempt(std::string(text), key);
      const std::string why = attempt.Begin();
      if (why.empty()) {
        attempts_.push_back(std::move(attempt));
      } else {
        failures_.push_back(attempt.name + ": " + why);
      }
    }
  }

  Status Wait(core::TimePoint deadline, Descriptor* out) {
    while (!attempts_.empty()) {
      const core::TimePoint now = core::Clock::now();
      if (now >= deadline) return TimedOut();
      core::TimePoint next = deadline;
      for (const Attempt& attempt : attempts_) {
        if (!attempt.fd.valid()) next = std::min(next, std::max(now, attempt.begin_at));
      }
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - now);
      std::vector<pollfd> fds;
      for (const Attempt& attempt : attempts_) {
        fds.push_back(
            {attempt.fd.get(), static_cast<short>(attempt.connected ? POLLIN : POLLOUT), 0});
      }
      const int ready = poll(fds.data(), fds.size(), static_cast<int>(left.count()));
      if (ready < 0 && errno != EINTR) {
        return {StatusCode::kBackend, std::string("poll: ") + std::strerror(errno)};
      }
      for (std::size_t i = fds.size(); i-- > 0;) {
        const bool is_due = fds[i].fd < 0 && core::Clock::now() >= attempts_[i].begin_at;
        if (!is_due && (ready <= 0 || fds[i].revents == 0)) continue;
        const std::string why = is_due ? attempts_[i].Begin() : GoOn(&attempts_[i]);
        if (attempts_[i].known) {
          *out = std::move(attempts_[i].fd);
          return Status::Ok();
        }
        if (why.empty()) continue;
        failures_.push_back(attempts_[i].name + ": " + why);
        attempts_.erase(attempts_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    return {StatusCode::kBackend, Joined(failures_, ", ")};
  }

 private:
  struct Attempt {
    Attempt(std::string address, const std::string& run_key)
        : name(std::move(address)), key(run_key), caller(run_key, name) {}

    // Connects, with a challenge of its own each time. Why it cannot be, else empty.
    std::string Begin() {
      std::string why;
      caller = Caller(key, name);
      reader = MessageReader(kMaxGreeting);
      connected = proven = false;
      fd = BeginToConnect(name, &why);
      return why;
    }

    std::string name;
    std::string key;
    Caller caller;
    MessageReader reader;
    Descriptor fd;             // none: it begins
    core::TimePoint begin_at;  // then
    std::string last = "no answer";
    bool connected = false;
    bool proven = false;  // by both, as far as this rank knows
    bool known = false;
  };

  // The next step; why it cannot be, else empty.
  static std::string GoOn(Attempt* attempt) {
    if (!attempt->connected) {
      std::string why = ConnectError(attempt->fd);
      if (!why.empty()) return why;
      attempt->connected = true;
      const std::string opening = attempt->caller.Opening();
      if (opening.empty()) return "the system gives no random numbers";
      return Say(opening, attempt);
    }
    std::string bytes;
    const Transfer transfer = ReadSome(attempt->fd.get(), &bytes, kMaxGreeting);
    attempt->reader.Append(bytes);
    std::optional<RankMessage> message;
    Status status = attempt->reader.Next(&message);
    std::string reply;
    if (status.ok() && message && attempt->proven) {
      attempt->known = std::holds_alternative<WelcomeMessage>(*message);
      if (attempt->known) return "";
      status = Status(StatusCode::kProtocol, "it does not say welcome");
    }
    if (status.ok() && message) status = attempt->caller.Take(*message, &reply);
    if (!status.ok()) return "not this run's sirtakirun: " + status.message();
    if (message) {
      attempt->proven = true;
      return Say(reply, attempt);
    }
    if (transfer.ended) BeginAgain(transfer, attempt);
    return "";
  }

  static void BeginAgain(const Transfer& transfer, Attempt* attempt) {
    attempt->last = transfer.why.empty() ? "closed the connection" : transfer.why;
    attempt->fd.Close();
    attempt->begin_at = core::Clock::now() + kBeginAgain;
  }

  // A connection that is new takes a few bytes at once.
  static std::string Say(const std::string& frame, Attempt* attempt) {
    const Transfer transfer = WriteSome(attempt->fd.get(), frame);
    if (transfer.bytes == frame.size()) return "";
    if (!transfer.ended) return "takes no bytes";
    BeginAgain(transfer, attempt);
    return "";
  }

  Status TimedOut() {
    for (const Attempt& attempt : attempts_) {
      failures_.push_back(attempt.name + ": " + attempt.last);
    }
    return {StatusCode::kTimedOut, Joined(failures_, ", ")};
  }

  std::vector<Attempt> attempts_;
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
      !IsSame(answer->proof, ProofOfLauncher(key_, address_, challenge_, answer->challenge))) {
    return {StatusCode::kProtocol,
            "it does not know the run's key, or passes on what another address says"};
  }
  *reply = Encode(ProofMessage{ProofOfRank(key_, address_, challenge_, answer->challenge)});
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
    *reply = Encode(AnswerMessage{ours_, ProofOfLauncher(key_, address_, theirs_, ours_)});
    return true;
  }
  const auto* proof = std::get_if<ProofMessage>(&message);
  knows_ = proof != nullptr && !ours_.empty() && !key_.empty() && !address_.empty() &&
           IsSame(proof->proof, ProofOfRank(key_, address_, theirs_, ours_));
  if (knows_) *reply = Encode(WelcomeMessage{});
  return knows_;
}

Status ConnectToAny(std::string_view addresses, const std::string& key, core::Duration timeout,
                    Descriptor* out) {
  return Attempts(addresses, key).Wait(core::Clock::now() + timeout, out);
}

}  // namespace sirtaki::launch
