// One process set as seen from one node of the tree: who is below, which keys wait for whom, who
// has joined or left. The bookkeeping of rules 1-4, 12 and 13; the negotiator decides what to do
// with it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "core/protocol/id_table.h"
#include "core/protocol/message.h"
#include "core/protocol/pending_keys.h"
#include "core/protocol/tree.h"

namespace sirtaki::core {

// An index into Tree::Node::children, or kSelf.
inline constexpr int kSelf = -1;

// Joins say which ranks below a node have joined in the present epoch: the node's own, and children with
// all that is below them.
struct Joins {
  bool any() const { return self || !children.empty(); }
  bool HasChild(int child) const {
    return std::find(children.begin(), children.end(), child) != children.end();
  }

  bool self = false;
  TimePoint self_since{};
  std::vector<int> children;
  int last = -1;      // the rank that joined last
  bool told = false;  // Joined was sent to the parent
};

// The watch over stalls keeps this of a set.
struct SetStalls {
  TimePoint next_check{};
  // ---- the seat's ----
  std::uint64_t circle_since = 0;  // the question with which it began to look for a circle
  // By who is late (as of Missing()): when the next warning about them is due. Kept as long as a key
  // waits for them that a warning has counted.
  std::map<int, TimePoint> next_warning;
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
  // Whether the child reported the key, which waits.
  bool HasReport(const Key& key, int child) const;
  // Everyone below has reported it, joined or left, and at least one has reported it.
  bool Complete(const PendingKey& pending) const;
  // Those below who neither reported it nor joined nor left, as children's indices and perhaps
  // kSelf.
  std::vector<int> Missing(const PendingKey& pending) const;
  // Adds the members that are counted without having reported this use.
  void AddSilent(PendingKey& pending) const;
  // Keys that became complete because somebody joined or left, in the order of their first report.
  std::vector<PendingKey*> CompleteKeys();
  void NoteJoined(int source, int last);
  void NoteLeft(const RankRanges& ranks);
  // All members below have joined or left; at least one has joined.
  bool AllJoinedOrLeft() const;
  void EndEpoch();  // JoinDone

  // A key may be added without a report: a rank's own join, and what a child says has waited long.
  PendingKeys keys;
  Joins joins;  // NoteJoined and EndEpoch alone change who has joined
  SetStalls stalls;
  IdTable ids;
  AgreedId next_id = 1;          // the seat's
  std::uint64_t next_batch = 1;  // the seat's
  std::vector<Entry> decided;    // the seat's, not yet a batch

 private:
  bool HasReport(const PendingKey& pending, int child) const;
  std::size_t Index(int child) const { return static_cast<std::size_t>(child); }
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
  std::vector<RankRanges> child_members_;  // by child index
  RankRanges left_;
};

}  // namespace sirtaki::core
