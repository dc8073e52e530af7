// Agrees with the other ranks on what is ready everywhere, in one order that has no cycle between
// overlapping process sets. A pure state machine: messages, requests and the time go in; messages,
// batches and warnings come out. It reads no clock, holds no lock, knows no transport. The rules
// are in docs/protocol.md; numbers in comments are theirs.
//
// Not thread-safe: touched by the holder of the engine's token only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/protocol/liveness.h"
#include "core/protocol/message.h"
#include "core/protocol/set_state.h"
#include "core/protocol/stall_watch.h"
#include "core/protocol/tree.h"

namespace sirtaki::core {

struct NegotiatorOptions : StallOptions {
  std::string host;
  std::map<SetNumber, RankRanges> sets;  // with the world as kWorldSet
  std::size_t id_capacity = 16384;       // agreed; per set, held by its seat
  bool reaches_all = false;              // a message may go to any rank, not only to neighbours
  // Wall clock for causes, microseconds since 1970.
  std::function<std::int64_t()> unix_us = [] { return std::int64_t{0}; };
};

// A decided entry has everything resolved: no ids are left.
struct DecidedFail {
  Key key;
  Status why;
};
struct DecidedJoin {
  SetNumber set = kWorldSet;
  int last = -1;
};
using Decided = std::variant<DecidedRun, DecidedFail, DecidedJoin, AddSetEntry, RemoveSetEntry,
                             LimitsEntry, AssemblyEntry>;
struct DecidedBatch {
  SetNumber set = kWorldSet;
  std::uint64_t number = 0;
  MembersPtr members;
  std::vector<Decided> entries;
};

struct Outgoing {
  int to = -1;
  MessageBody body;
};

class Negotiator final : private StallWatch::Surroundings {
 public:
  // Precondition: options.rank is a rank of the tree, options.sets holds the world.
  Negotiator(NegotiatorOptions options, const Tree& tree);
  Negotiator(const Negotiator&) = delete;
  Negotiator& operator=(const Negotiator&) = delete;

  // Whether this rank is a member of a set that exists.
  bool IsMember(SetNumber set) const;
  // A request of this rank; they come in the order of their submission. Preconditions:
  // IsMember(set), this rank has neither joined the set nor left, and the key is not in flight
  // here.
  void Submit(const Request& request, TimePoint now);
  // This rank has no more work in the set until everyone has joined (12).
  void Join(SetNumber set, TimePoint now);
  // This rank takes part in nothing more (16). Idempotent.
  void Leave(const std::string& why, TimePoint now);
  // RaiseFault tells of a fault; the first that a rank sees counts, and floods (15). A fault whose
  // origin names no rank began here.
  void RaiseFault(const Status& why);
  void RaiseFault(StatusCode code, std::string text, std::string tensor) {
    RaiseFault({code, std::move(text), Origin{-1, {}, std::move(tensor)}});
  }
  // The time of a call, `limit`, is over (14). If its key is not decided the seat is asked who
  // misses it, which makes it a fault that says so, in the time that this returns if it can; else
  // it is one at once.
  Duration TimeOut(const Key& key, Duration limit, TimePoint now);

  // A message of a neighbour, or a fault of anybody's. A message that no correct peer sends is a fault
  // (kProtocol).
  void Receive(int from, MessageBody body, TimePoint now);

  // The local state is what the engine knows and the rules need.
  struct LocalState {
    std::vector<RunningOperation> running;  // the oldest first (18, 19)
    bool drained = true;                    // this rank's lanes are empty (17)
    bool others_pause = false;              // or this rank does: nobody is lost (19)
  };
  // Timers: stalls, pings, lost peers, the end.
  void Step(const LocalState& local, TimePoint now);
  // When Step is due even if nothing arrives; TimePoint::max() if never.
  TimePoint NextDeadline() const {
    return faulted() || closed() ? TimePoint::max() : std::min(next_deadline_, stalls_.next());
  }

  // Ready is all that there is to do: messages to send, then batches to start, in this order.
  struct Ready {
    std::vector<Outgoing> outgoing;
    std::vector<DecidedBatch> batches;
    std::vector<StallWarning> warnings;
  };
  // Takes it; once a round. `with_batches`: false leaves these for a later round.
  Ready TakeReady(bool with_batches = true);

  bool faulted() const override { return cause_.has_value(); }
  const Cause& cause() const { return *cause_; }  // precondition: faulted()
  // True when everyone has left, this subtree is drained and the parent knows: stop (17).
  bool closed() const { return end_ == End::kClosed; }
  bool leaving() const { return left_since_.has_value(); }
  bool all_left() const { return end_ != End::kOpen; }
  // Keys that are not decided, or batches and messages that were not taken.
  bool Outstanding() const;
  // The sets of which this rank is a member.
  std::vector<std::pair<SetNumber, RankRanges>> MemberSets() const;
  // Quiescent serves invariants: nothing is pending, nothing half told.
  bool Quiescent() const;
  // KnownIds serves tests: the live ids of a set here, after the batches seen so far.
  std::vector<AgreedId> KnownIds(SetNumber set) const;

 private:
  // An item waits to go up, in order. Of a ready one that is the key in its set, which no decision
  // ends before it is told: it is written when it is taken, so that it uses ids as the table is at
  // that moment and the acknowledgement beside it is true (10).
  using UpItem = std::variant<PendingKey*, JoinedItem, LeftItem, StalledItem>;

  // The end comes in these steps (17).
  enum class End : std::uint8_t {
    kOpen,
    kBye,           // everyone has left
    kAcknowledged,  // and the parent was told that this subtree is drained
    kClosed,
  };

  struct Link {
    int rank = -1;
    std::uint64_t sent = 0;  // batches of the downward stream
    std::uint64_t acknowledged = 0;
    std::vector<Batch> unsent;  // not taken yet
    bool bye_acknowledged = false;
  };

  // An eviction that some child has not acknowledged: position of its batch on each child's link.
  struct Forgetting {
    SetNumber set = kWorldSet;
    std::vector<AgreedId> ids;
    std::vector<std::pair<int, std::uint64_t>> positions;
  };

  // ---- negotiator.cc: reports up, decisions ----
  int ChildIndex(int rank) const;  // -1: not a child
  void ReceiveReport(int child, ReportMessage report, TimePoint now);
  bool ReceiveReady(int child, ReadyItem& item, TimePoint now);
  // Forwards or decides the key if it is complete.
  void Advance(SetState& set, PendingKey& pending);
  void AdvanceAfterDeparture(SetState& set);  // somebody joined or left
  void NoteLeft(const RankRanges& ranks, const std::string& why);
  void Decide(SetState& set, PendingKey& pending);
  Entry DecideChange(const Key& key, const Asked& change, const PendingKey& pending);
  void EvictOverCapacity(SetState& set);
  void Protocol(int from, const std::string& what);  // raises the fault
  void AdoptFault(Cause cause, int from);

  // ---- negotiator_stream.cc: the stream down, ids, what the engine takes ----
  void ReceiveStream(StreamMessage stream, TimePoint now);
  void CutBatches();  // decided entries -> batches in the stream
  void CutBatchesOf(SetState& set);
  void ApplyBatch(Batch batch);  // executes here and passes down
  bool ApplyEntry(SetState& set, const Entry& entry, DecidedBatch& decided);
  bool ApplyRun(SetState& set, const RunEntry& run, DecidedBatch& decided);
  // MayBeDecided says whether an entry of this key makes sense here; false: a fault was raised.
  bool MayBeDecided(const SetState& set, const Key& key, const PendingKey* pending);
  bool MayBeDecided(SetState& set, const Key& key) {
    return MayBeDecided(set, key, set.keys.Find(key));
  }
  bool MayChangeSets(const std::string& what, SetNumber set, const Key& key,
                     const DecidedBatch& decided);  // false: a fault was raised
  bool Apply(const AddSetEntry& entry, DecidedBatch& decided);
  bool Apply(const RemoveSetEntry& entry, DecidedBatch& decided);
  bool Apply(const LimitsEntry& entry, DecidedBatch& decided);
  template <typename Change>
  bool Pass(const Change& entry, DecidedBatch& decided);
  void ForgetSet(SetNumber number);
  bool IsGone(SetNumber set) const;  // it has been, and was removed
  void CutBatch(SetState& set, std::vector<Entry> entries);
  void RememberEviction(SetState& set, const std::vector<AgreedId>& ids);
  void ForgetAcknowledged();
  ReadyItem WriteReady(PendingKey& pending);
  void TakeReport(std::vector<Outgoing>* outgoing);

  // ---- negotiator_waiting.cc: pings, the end ----
  void CheckPeers(const LocalState& local, TimePoint now);
  void WaitOn(SetState& set, TimePoint since, TimePoint now, int except = -1);
  void CheckBye(const LocalState& local);

  // ---- for the watch over stalls ----
  SetState* FindSet(SetNumber set) override;
  const RankRanges& left() const override { return left_; }
  void Report(StalledItem item) override { up_.push_back(std::move(item)); }
  void Fail(StatusCode code, const std::string& text, const std::string& tensor) override {
    RaiseFault(code, text, tensor);
  }
  void SendNow(int to, MessageBody body) override { immediate_.push_back({to, std::move(body)}); }

  void Due(TimePoint at);
  std::string LeftText(const RankRanges& ranks) const;

  NegotiatorOptions options_;
  Tree::Node node_;
  int world_size_;
  std::map<SetNumber, SetState> sets_;  // those that matter to this node
  std::set<SetNumber> set_numbers_;     // all that exist, also elsewhere
  SetNumber last_set_ = kWorldSet;      // the highest that was given
  std::vector<Link> children_;          // parallel to node_.children

  std::vector<UpItem> up_;
  std::uint64_t applied_ = 0;  // batches of the parent's stream
  std::size_t evictions_unacknowledged_ = 0;
  std::deque<Forgetting> forgetting_;
  std::vector<Outgoing> immediate_;  // outside the order
  std::vector<DecidedBatch> batches_;

  RankRanges left_;  // known here: of this subtree
  std::vector<std::pair<RankRanges, std::string>> left_why_;
  std::optional<TimePoint> left_since_;  // this rank has left then
  End end_ = End::kOpen;

  Liveness liveness_;
  // A ping makes us wait too, until then, on everyone but the one who asked: asking back would keep
  // two neighbours asking each other for ever (19). By (set, asker).
  std::map<std::pair<SetNumber, int>, TimePoint> asked_until_;
  StallWatch stalls_;
  TimePoint next_deadline_ = TimePoint::max();

  std::optional<Cause> cause_;
};

}  // namespace sirtaki::core
