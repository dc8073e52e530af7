#include "core/protocol/set_state.h"

#include <algorithm>
#include <utility>

namespace sirtaki::core {

void PendingKey::Merge(const Asked& asked, const std::string& invalid, const RankRanges& ranks) {
  const auto same = std::find_if(variants.begin(), variants.end(), [&](const Variant& known) {
    return known.invalid == invalid && AskTheSame(known.asked, asked);
  });
  if (same != variants.end()) {
    same->ranks.Add(ranks);
  } else if (variants.size() < kMaxVariants) {
    variants.push_back({asked, invalid, ranks});
  } else {
    ++more_variants;
  }
}

SetState::SetState(SetNumber number, RankRanges members, const Tree::Node& node, int self)
    : number_(number),
      members_(std::make_shared<const RankRanges>(std::move(members))),
      self_(self),
      self_member_(members_->Contains(self)) {
  bool below_one_child = false;
  for (std::size_t i = 0; i < node.children.size(); ++i) {
    child_members_.push_back(members_->Intersection(node.child_subtrees[i]));
    if (child_members_.back().empty()) continue;
    children_.push_back(static_cast<int>(i));
    below_one_child |= child_members_.back() == *members_;
  }
  const bool all_below = node.subtree.ContainsAll(*members_);
  seat_ = all_below && !below_one_child;
  relevant_ = seat_ || (!all_below && (self_member_ || !children_.empty()));
}

PendingKey* SetState::AddReport(const Key& key, int source, const std::vector<bool>& absent,
                                const RankRanges& silent, TimePoint now) {
  const auto [found, inserted] = pending_.try_emplace(key);
  PendingKey& pending = found->second;
  if (inserted) {
    pending.since = now;
    NoteOrder(pending, key);
  }
  if (source == kSelf) {
    if (pending.self_reported) return nullptr;
    pending.self_reported = true;
  } else {
    if (pending.child_reported.empty()) pending.child_reported.resize(child_members_.size());
    if (pending.child_reported[Index(source)]) return nullptr;
    pending.child_reported[Index(source)] = true;
  }
  if (pending.reports == 0) {
    pending.absent = absent;
  } else if (pending.absent.size() != absent.size()) {
    pending.absent.clear();  // one of them has everything
  } else {
    for (std::size_t i = 0; i < absent.size(); ++i)
      pending.absent[i] = pending.absent[i] && absent[i];
  }
  ++pending.reports;
  pending.silent.Add(silent);
  return &pending;
}

void SetState::NoteOrder(PendingKey& pending, const Key& key) {
  pending.order = next_order_++;
  // A key that waits for long must not make the list of those that came and went grow.
  if (order_.size() > 2 * pending_.size() + 64) {
    std::erase_if(order_, [&](const auto& entry) {
      const auto found = pending_.find(entry.second);
      return found == pending_.end() || found->second.order != entry.first;
    });
  }
  order_.emplace_back(pending.order, key);
}

PendingKey& SetState::AddPlaceholder(const Key& key, TimePoint since) {
  const auto [found, inserted] = pending_.try_emplace(key);
  if (inserted) {
    found->second.since = since;
    NoteOrder(found->second, key);
  }
  return found->second;
}

PendingKey* SetState::Find(const Key& key) {
  const auto found = pending_.find(key);
  return found == pending_.end() ? nullptr : &found->second;
}

bool SetState::Gone(int source) const {
  if (source == kSelf) return self_joined_ || left_.Contains(self_);
  if (std::find(joined_children_.begin(), joined_children_.end(), source) !=
      joined_children_.end()) {
    return true;
  }
  return !left_.empty() && left_.ContainsAll(child_members_[Index(source)]);
}

bool SetState::Misses(const PendingKey& pending, int source) const {
  if (source == kSelf) return self_member_ && !pending.self_reported && !Gone(kSelf);
  const bool reported = !pending.child_reported.empty() && pending.child_reported[Index(source)];
  return !reported && !Gone(source);
}

std::vector<int> SetState::Missing(const PendingKey& pending) const {
  std::vector<int> missing;
  if (Misses(pending, kSelf)) missing.push_back(kSelf);
  for (const int child : children_) {
    if (Misses(pending, child)) missing.push_back(child);
  }
  return missing;
}

bool SetState::Complete(const PendingKey& pending) const {
  if (pending.reports == 0) return false;
  // The usual case, without looking at each child.
  if (pending.reports == static_cast<int>(children_.size()) + (self_member_ ? 1 : 0)) return true;
  return !Misses(pending, kSelf) && std::none_of(children_.begin(), children_.end(),
                                                 [&](int child) { return Misses(pending, child); });
}

void SetState::AddSilent(PendingKey& pending) const {
  if (self_member_ && !pending.self_reported) pending.silent.Add(self_);
  for (const int child : children_) {
    if (pending.child_reported.empty() || !pending.child_reported[Index(child)]) {
      pending.silent.Add(child_members_[Index(child)]);
    }
  }
}

std::vector<SetState::Undecided> SetState::UndecidedKeys() {
  std::vector<Undecided> keys;
  for (const auto& [order, key] : order_) {
    const auto found = pending_.find(key);
    if (found != pending_.end() && found->second.order == order && !found->second.forwarded) {
      keys.push_back({&found->first, &found->second});
    }
  }
  return keys;
}

std::vector<Key> SetState::CompleteKeys() {
  std::vector<Key> keys;
  for (const Undecided& undecided : UndecidedKeys()) {
    if (Complete(*undecided.pending)) keys.push_back(*undecided.key);
  }
  return keys;
}

std::optional<TimePoint> SetState::OldestPending() {
  while (!order_.empty()) {
    const auto found = pending_.find(order_.front().second);
    if (found != pending_.end() && found->second.order == order_.front().first) {
      return found->second.since;
    }
    order_.pop_front();
  }
  return std::nullopt;
}

void SetState::NoteJoined(int source, int last) {
  if (source == kSelf) {
    self_joined_ = true;
  } else if (std::find(joined_children_.begin(), joined_children_.end(), source) ==
             joined_children_.end()) {
    joined_children_.push_back(source);
  }
  last_joined_ = last;
}

void SetState::NoteLeft(const RankRanges& ranks) { left_.Add(ranks.Intersection(*members_)); }

bool SetState::AllJoinedOrLeft() const {
  if (!SomeJoined()) return false;
  if (self_member_ && !Gone(kSelf)) return false;
  return std::all_of(children_.begin(), children_.end(), [&](int child) { return Gone(child); });
}

void SetState::EndEpoch() {
  self_joined_ = false;
  joined_children_.clear();
  joined_told = false;
  last_joined_ = -1;
  pending_.erase(Key::Join(number_));
}

}  // namespace sirtaki::core
