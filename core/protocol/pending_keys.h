// The keys of one process set that somebody in this node's subtree has reported and that are not
// decided, in the order of their first report.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/protocol/message.h"

namespace sirtaki::core {

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

// Keys are kept when they wait no more, since programs use most of them again and again.
class PendingKeys {
 public:
  // Adds the key behind all others, unless it waits already.
  PendingKey& Add(const Key& key, TimePoint since);
  PendingKey* Find(const Key& key);  // null: it does not wait
  const PendingKey* Find(const Key& key) const { return const_cast<PendingKeys*>(this)->Find(key); }
  void Erase(const Key& key) {
    if (PendingKey* const pending = Find(key)) Erase(*pending);
  }
  void Erase(PendingKey& pending);

  const PendingKey* Oldest() const { return first_; }  // null: none waits
  // Those that are neither forwarded nor decided.
  std::vector<PendingKey*> Undecided();
  // A key that comes first from now on has this order, or a higher one.
  std::uint64_t next_order() const { return next_order_; }

 private:
  static constexpr std::size_t kFewestKept = 1024;

  void DropUnused();

  std::unordered_map<Key, PendingKey, KeyHash> keys_;  // that wait, or have waited
  std::size_t most_keys_ = kFewestKept;                // what is not used is dropped then
  PendingKey* first_ = nullptr;
  PendingKey* last_ = nullptr;
  std::uint64_t next_order_ = 0;
};

}  // namespace sirtaki::core
