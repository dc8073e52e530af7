// Ranks that wait for each other: the last part of (18). A rank whose only thread waits for a key
// submits nothing before that key has ended, and says so when it is asked about a key that it misses.
// The first stall begins the questions, and their answers lead to others. Keys that lead back to
// themselves over such ranks will never end.
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/protocol/stall_watch.h"

namespace sirtaki::core {
namespace {

constexpr const char* kOneOrder =
    "every rank has to make these calls, in one order; where the backward() of a rank meets no "
    "gradient of an optimizer, the rank calls synchronize() of the optimizer; where it meets "
    "none of a DistributedDataParallel, it adds 0 times the module's output to its loss; where "
    "the backward() of each meets another optimizer only, they use average_at \"step\", or one "
    "backward() for both";

// No program has a longer circle, and a peer that makes nonsense up shall not exhaust the stack.
constexpr std::size_t kLongest = 64;

// Keys, each with a rank that misses it and waits for the next one.
using Path = std::vector<std::pair<Key, StalledKey::HeldUp>>;
using Keys = std::unordered_set<Key, KeyHash>;

bool IsUndecided(const PendingKey& pending) { return !pending.forwarded; }

// True: `path` leads from `target` back to it.
bool FindCircle(const SetState& set, const Key& target, const Key& key, Path& path, Keys& seen) {
  if (path.size() == kLongest) return false;
  const PendingKey* const found = set.keys.Find(key);
  if (found == nullptr || found->stall == nullptr) return false;
  const StalledKey& stall = *found->stall;
  for (const StalledKey::HeldUp& held_up : stall.held_up) {
    const PendingKey* const next = set.keys.Find(held_up.by);
    if (next == nullptr || !IsUndecided(*next)) continue;
    // It is the key that the rank meant: no later use of its name.
    if (next->order >= stall.asked) continue;
    path.emplace_back(key, held_up);
    if (held_up.by == target) return true;
    if (seen.insert(held_up.by).second && FindCircle(set, target, held_up.by, path, seen)) {
      return true;
    }
    path.pop_back();
  }
  return false;
}

}  // namespace

// The key that this rank waits for is told only if this node knows it to be undecided: the engine may
// still have one whose decision came with the question.
RankActivity StallWatch::Activity() {
  RankActivity activity{options_.rank, options_.activity(), options_.waits_for()};
  if (activity.waits_for) {
    SetState* const set = around_.FindSet(activity.waits_for->set);
    const PendingKey* const pending =
        set == nullptr ? nullptr : set->keys.Find(*activity.waits_for);
    if (pending == nullptr || !pending->self_reported) activity.waits_for.reset();
  }
  return activity;
}

// NoteHeldUp is the seat's: a question has been answered. Asks about the keys that its answers lead
// to.
void StallWatch::NoteHeldUp(SetState& set, PendingKey& pending,
                            const StalledKey::Inquiry& inquiry) {
  if (options_.stall_limit <= Duration::zero()) return;
  if (!inquiry.for_circle) set.stalls.circle_since = inquiry.number;
  StalledKey& stall = pending.Stall();
  stall.held_up.clear();
  stall.asked = inquiry.asked;
  stall.question = inquiry.number;
  for (const RankActivity& activity : inquiry.activities) {
    if (!activity.waits_for) continue;
    stall.held_up.push_back({activity.rank, *activity.waits_for});
    PendingKey* const by = set.keys.Find(*activity.waits_for);
    if (by == nullptr || !IsUndecided(*by)) continue;
    const bool is_known = by->stall != nullptr && by->stall->question >= set.stalls.circle_since;
    if (!is_known) by->Stall().to_be_asked = true;
  }
  RaiseCircle(set, *pending.key);
}

void StallWatch::RaiseCircle(const SetState& set, const Key& key) {
  Path path;
  Keys seen{key};
  if (!FindCircle(set, key, key, path, seen)) return;
  std::string text = "ranks wait for each other, so none of them can go on: ";
  for (const auto& [missed, held_up] : path) {
    text += "rank " + std::to_string(held_up.rank) + " has not submitted " + missed.ToString() +
            " and waits for " + held_up.by.ToString() + "; ";
  }
  around_.Fail(StatusCode::kMismatch, text + kOneOrder, TensorName(key));
}

}  // namespace sirtaki::core
