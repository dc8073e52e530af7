// Sends and receives between two ranks, beside the lanes: a header, then the bytes, in the order of
// the calls for each peer and tag. A receive that expects something else than was sent takes the
// bytes all the same and fails alone.
//
// A message may have a carrier, which moves bytes past the host. Its header then offers that, and its
// line waits for the receiver's answer: the bytes follow, or the carriers of both sides take it over,
// in the order in which the receiver has said so.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/engine/executor.h"
#include "ops/base/backend.h"
#include "ops/groups/lane.h"
#include "ops/host/p2p_header.h"

namespace sirtaki::ops {

// Set by whoever brings a message's memory.
using P2pGate = std::shared_ptr<const std::atomic<bool>>;

// Carries one message past the host, if the carriers of both sides can. P2p calls it under the token;
// nothing in it blocks.
class P2pCarrier {
 public:
  virtual ~P2pCarrier() = default;
  // Returns what the header of a send offers when its turn has come; 0: nothing.
  virtual std::uint16_t Offer() = 0;
  // The answer of a receive to such an offer, which is not 0. After kGo this has taken it over.
  virtual P2pAnswer Answer(std::uint16_t offer) = 0;
  // A send is told the answer. After kGo this has taken it over.
  virtual void Take(const P2pAnswer& answer) = 0;
  // The message goes through the host: its memory is wanted.
  virtual void Bring() = 0;
};

// The host lanes own it. Start, Step, unfinished and Release are called under the token, the rest by
// anyone. No lock is held while a handle or the backend is called.
class P2p {
 public:
  // A failure is that of a message whose medium failed, or whose peer breaks the protocol.
  struct Failure {
    core::Status why;
    core::WorkPtr work;
  };

  P2p(int rank, Backends& backend) : rank_(rank), backend_(backend) {}

  // `work`: its request's signature is of kind kSend or kReceive. Completes its handle when Stop
  // was called before. `there`: its memory is not looked at before this is set, nor are input and
  // output, but it has its place in its line from now on; null: it is there. `carrier`: the handle
  // completes, too, when that has taken the message over; null: the host carries it.
  void Start(core::WorkPtr work, core::TimePoint now, P2pGate there = nullptr,
             std::shared_ptr<P2pCarrier> carrier = nullptr);
  // True if something moved. After a failure the caller calls Stop.
  bool Step(std::optional<Failure>* failure);
  bool unfinished() const { return !under_way_.empty(); }

  std::vector<core::RunningOperation> Running() const { return lane_.Running(); }
  // Every handle completes with `why`, which is not ok, and nothing is started any more.
  void Stop(const core::Status& why) {
    lane_.Stop(why, std::nullopt, [] {});
  }

  // After Stop: withdraws what can be withdrawn. Returns what the rest may still use, which has to
  // stay for the life of the process; null if there is none.
  std::shared_ptr<void> Release();

 private:
  struct Task {
    std::uint64_t number = 0;
    core::WorkPtr work;
    core::TimePoint since;
    void Complete(const core::Status& status) const { work->handle->Complete(status); }
    void AddRunning(std::vector<core::RunningOperation>* list) const;
  };
  enum class Way : std::uint8_t { kOpen, kOffered, kHost, kCarried };
  struct Message : Task {
    P2pGate there;
    std::shared_ptr<P2pCarrier> carrier;
    Way way = Way::kHost;
    P2pHeaderBytes header;
    P2pAnswerBytes answer;                 // of a receive
    std::unique_ptr<std::byte[]> scratch;  // for the bytes of a receive that expects others
    core::Status verdict;                  // of a receive, once its header is there
    // Those of a send are started together, those of a receive one after the other.
    std::unique_ptr<Completion> header_operation;
    std::unique_ptr<Completion> answer_operation;
    std::unique_ptr<Completion> bytes_operation;
    std::int64_t bytes = 0;      // of a receive: those that were sent
    bool has_header = false;     // of a receive
    bool has_left_line = false;  // the bytes are under way, or there are none
  };
  // The answers of one rank to the offers that it was made.
  struct Answers {
    int expected = 0;
    P2pAnswerBytes bytes;
    std::unique_ptr<Completion> operation;
  };
  using MessagePtr = std::unique_ptr<Message>;
  using Line = std::pair<int, int>;  // peer and tag

  // Waiting: nothing changed; moved: something did; done: its handle is to be completed with
  // `*status`, which is a failure unless it is ok or kMismatch.
  enum class Advance : std::uint8_t { kWaiting, kMoved, kDone };
  Advance AdvanceSend(Message& message, core::Status* status);
  Advance AdvanceReceive(Message& message, core::Status* status);
  static bool IsThere(const Message& message);
  void SendReady(const Line& line);
  void MakeOffer(Message& message);
  void SendHeader(Message& message, const P2pHeader& header);
  void ListenForAnswer(int peer, Answers& answers);
  core::Status TakeAnswers(int peer, Answers& answers, bool* moved);
  // The first unanswered offer to the peer.
  core::WorkPtr Unanswered(int peer) const;
  Failure FailureOf(const core::Status& status, const core::WorkPtr& work) const;
  core::Status TakeHeader(Message& message);
  void DecideWay(Message& message, std::uint16_t offer);
  void ReceiveBytes(Message& message);
  void Listen(const Line& line);

  const int rank_;
  Backends& backend_;

  // The messages are used under the token.
  std::vector<MessagePtr> under_way_;  // oldest first
  // Sends that wait for their memory, and those behind them.
  std::map<Line, std::deque<Message*>> unsent_;
  // Receives that wait for their header; only the first of a line listens for it.
  std::map<Line, std::deque<Message*>> listening_;
  std::map<int, Answers> answers_;  // by peer

  Lane<Task> lane_{nullptr};  // has no thread
};

// "receive from rank 1, tag 3"
std::string P2pText(const core::Work& work);

}  // namespace sirtaki::ops
