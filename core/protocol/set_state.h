// One process set as seen from one node of the tree: who is below, which keys wait for whom, who
// has joined or left. The bookkeeping of rules 1-4, 12 and 13; the negotiator decides what to do
// with it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/protocol/id_table.h"
#include "core/protocol/message.h"
#include "core/protocol/tree.h"

namespace sirtaki::core {

// An index into Tree::Node::children, or kSelf.
inline constexpr int kSelf = -1;

// A key that waits for long, as the watch over stalls sees it (18).
struct StalledKey {
  bool reported = false;  // the seat was told that it waits too long
  // The seat's question to those who miss the key.
  struct Inquiry {
    TimePoint deadline{};
    std::vector<int> awaited;  // children that have not answered
    RankRanges missing;
    std::vector<RankActivity> activities;
    bool fault_after = false;  // the limit has passed: its end is a fault
    Duration call_limit{};     // that of a call, if not zero; else that of stalls
    bool for_circle = false;   // asked to find ranks that wait for each other: no warning
    std::uint64_t number = 0;  // of the question
    std::uint64_t asked = 0;   // what came first before it has a lower `order`
  };
  std::optional<Inquiry> inquiry;
  bool warned = false;    // a warning has counted it
  Duration call_limit{};  // not zero: a call's own time, which is over

  // ---- at the seat: ranks that wait for each other ----
  bool to_be_asked = false;  // who misses it, and what these wait for
  // Ranks that miss it and submit nothing before another key ends, as the last question has found
  // them; true for as long as that key is one that came before the question.
  struct HeldUp {
    int rank = -1;
    Key by;
  };
  std::vector<HeldUp> held_up;
  std::uint64_t asked = 0;     // the question's, as above
  std::uint64_t question = 0;  // and its number
};

// A key that somebody in this subtree has reported and that is not decided. A set has those that
// wait in a list, in the order of their first report.
struct PendingKey {
  const Key* key = nullptr;  // null: it waits no more, and is kept for the next time
  PendingKey* before = nullptr;
  PendingKey* after = nullptr;
  TimePoint since{};
  std::uint64_t order = 0;  // of the first report, among all of the set
  int reports = 0;
  bool self_reported = false;
  bool forwarded = false;  // to the parent, whose decision is awaited; at the seat: decided
  bool told = false;       // and the parent's message has been written
  std::vector<bool> child_reported;
  std::vector<Variant> variants;
  std::uint32_t more_variants = 0;
  std::vector<bool> absent;
  RankRanges silent;

  // Adds what these ranks ask for: equal requests are one variant, and beyond the limit only their
  // number is kept.
  void Merge(const Asked& asked, const std::string& invalid, const RankRanges& ranks);

  std::unique_ptr<StalledKey> stall;  // null for most: they do not wait for long

  // It waits no more. Keeps the memory that the next use of the key needs.
  void Reset();

  StalledKey& Stall() {
    if (stall == nullptr) stall = std::make_unique<StalledKey>();
    return *stall;
  }
};

class SetState {
 public:
  SetState(SetNumber number, RankRanges members, const Tree::Node& node, int self);

  SetNumber number() const { return number_; }
  const RankRanges& members() const { return *members_; }
  const MembersPtr& shared_members() const { return members_; }
  bool self_member() const { return self_member_; }
  bool seat() const { return seat_; }
  // The node has members below (or is one) and lies on their way to the seat, or is the seat.
  bool relevant() const { return relevant_; }
  const std::vector<int>& children() const { return children_; }  // those with members, by index
  const RankRanges& child_members(int child) const { return child_members_[Index(child)]; }

  // Notes that `source` (a child's index or kSelf) reported the key, whose variants the caller
  // merges. Null: it had already.
  PendingKey* AddReport(const Key& key, int source, const std::vector<bool>& absent,
                        const RankRanges& silent, TimePoint now);
  // A key that is known to wait somewhere below, perhaps without a report here yet.
  PendingKey& AddPlaceholder(const Key& key, TimePoint since);
  PendingKey* Find(const Key& key);  // null: it does not wait
  const PendingKey* Find(const Key& key) const { return const_cast<SetState*>(this)->Find(key); }
  void Erase(const Key& key) {
    if (PendingKey* const pending = Find(key)) Erase(*pending);
  }
  void Erase(PendingKey& pending);

  // Everyone below has reported it, joined or left, and at least one has reported it.
  bool Complete(const PendingKey& pending) const;
  // Those below who neither reported it nor joined nor left, as children's indices and perhaps
  // kSelf.
  std::vector<int> Missing(const PendingKey& pending) const;
  // Adds the members that are counted without having reported this use.
  void AddSilent(PendingKey& pending) const;
  // Keys that are neither forwarded nor decided, in the order of their first report.
  std::vector<PendingKey*> UndecidedKeys();
  // Keys that became complete because somebody joined or left, in the order of their first report.
  std::vector<PendingKey*> CompleteKeys();
  // A key that comes first from now on has this order, or a higher one.
  std::uint64_t next_order() const { return next_order_; }
  // The first of the keys that are not decided; null: none waits.
  const PendingKey* OldestPending() const { return first_; }

  void NoteJoined(int source, int last);
  void NoteLeft(const RankRanges& ranks);
  // All members below have joined or left; at least one has joined.
  bool AllJoinedOrLeft() const;
  bool SomeJoined() const { return self_joined_ || !joined_children_.empty(); }
  bool self_joined() const { return self_joined_; }
  int last_joined() const { return last_joined_; }
  void EndEpoch();  // JoinDone

  IdTable ids;
  AgreedId next_id = 1;          // the seat's
  std::uint64_t next_batch = 1;  // the seat's
  std::vector<Entry> decided;    // the seat's, not yet a batch
  bool joined_told = false;      // Joined was sent to the parent in this epoch
  TimePoint next_stall_check{};
  std::uint64_t circle_since = 0;  // the seat's: the question with which it began to look for one
  // The seat's, by who is late (as of Missing()): when the next warning about them is due. Kept as
  // long as a key waits for them that a warning has counted.
  std::map<int, TimePoint> next_warning;
  TimePoint joined_since{};

 private:
  static constexpr std::size_t kFewestKept = 1024;

  std::size_t Index(int child) const { return static_cast<std::size_t>(child); }
  void DropUnused();
  // The usual case, without a look at each child.
  bool AllReported(const PendingKey& pending) const {
    return pending.reports == static_cast<int>(children_.size()) + (self_member_ ? 1 : 0);
  }
  bool Misses(const PendingKey& pending, int source) const;
  bool Gone(int source) const;  // all its members have joined or left

  SetNumber number_;
  MembersPtr members_;
  int self_;
  bool self_member_ = false;
  bool seat_ = false;
  bool relevant_ = false;
  std::vector<int> children_;
  std::vector<RankRanges> child_members_;              // by child index
  std::unordered_map<Key, PendingKey, KeyHash> keys_;  // that wait, or have waited
  std::size_t most_keys_ = kFewestKept;                // what is not used is dropped then
  PendingKey* first_ = nullptr;
  PendingKey* last_ = nullptr;
  std::uint64_t next_order_ = 0;
  bool self_joined_ = false;
  std::vector<int> joined_children_;
  RankRanges left_;
  int last_joined_ = -1;
};

}  // namespace sirtaki::core
