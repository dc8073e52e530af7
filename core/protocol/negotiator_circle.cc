// Ranks that wait for each other: the last part of (18). A rank that submits nothing before a key has
// ended, because its only thread waits for it, says so when that takes a while, and in the answer to
// any question about what it misses. Where these lead back to where they began, no rank will ever
// go on.
#include <algorithm>
#include <chrono>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/protocol/negotiator.h"

namespace sirtaki::core {
namespace {

// In the second round of questions all ranks had known for long what was decided before the first.
constexpr int kLooks = 2;

constexpr const char* kOneOrder =
    "every rank has to make these calls, in one order; where the backward() of a rank meets no "
    "gradient of an optimizer, the rank calls synchronize() of the optimizer";

// Keys, each with a rank that misses it and waits for the next one.
using Path = std::vector<std::pair<const Key*, const PendingKey::HeldUp*>>;
using Keys = std::unordered_set<Key, KeyHash>;

// True: `path` leads from one of its keys back to it, and begins with it.
bool FindCircle(SetState& set, const Key& key, Path& path, Keys& seen) {
  const auto known =
      std::find_if(path.begin(), path.end(), [&](const auto& step) { return *step.first == key; });
  if (known != path.end()) {
    path.erase(path.begin(), known);
    return true;
  }
  const PendingKey* const pending = set.Find(key);
  if (pending == nullptr || !pending->holds_up || pending->forwarded) return false;
  if (!seen.insert(key).second) return false;
  for (const PendingKey::HeldUp& held_up : pending->held_up) {
    path.emplace_back(&key, &held_up);
    if (FindCircle(set, held_up.by, path, seen)) return true;
    path.pop_back();
  }
  return false;
}

}  // namespace

void Negotiator::HeldUpBy(const Key& key, TimePoint now) {
  SetState* const set = FindSet(key.set);
  PendingKey* const pending = set == nullptr ? nullptr : set->Find(key);
  if (faulted() || pending == nullptr || !pending->self_reported) return;
  if (options_.stall_limit <= Duration::zero()) return;
  if (set->seat()) return NoteHoldsUp(*set, *pending, now);
  const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(now - pending->since);
  up_.push_back(StalledItem{key, waited.count(), 0, /*holds_up=*/true});
}

// At the seat. One key alone that ranks wait for waits for nobody who waits.
void Negotiator::NoteHoldsUp(SetState& set, PendingKey& pending, TimePoint now) {
  pending.holds_up = true;
  std::vector<SetState::Undecided> keys = set.UndecidedKeys();
  std::erase_if(keys, [](const auto& key) { return !key.pending->holds_up; });
  if (keys.size() < 2) return;
  for (const auto& [key, state] : keys) state->looks = kLooks;
  set.next_stall_check = now;
  Due(now);
}

// When everybody has been asked about every key as often as kLooks.
void Negotiator::CheckCircle(SetState& set) {
  for (const auto& [key, pending] : set.UndecidedKeys()) {
    if (pending->looks > 0) return;
  }
  Keys seen;
  for (const auto& [key, pending] : set.UndecidedKeys()) {
    Path path;
    if (!FindCircle(set, *key, path, seen)) continue;
    std::string text = "ranks wait for each other, so none of them can go on: ";
    for (const auto& [missed, held_up] : path) {
      text += "rank " + std::to_string(held_up->rank) + " has not submitted " + missed->ToString() +
              " and waits for " + held_up->by.ToString() + "; ";
    }
    return RaiseFault(StatusCode::kMismatch, text + kOneOrder, TensorName(*path.front().first));
  }
}

}  // namespace sirtaki::core
