#include "core/protocol/set_state.h"

#include <algorithm>
#include <utility>

namespace sirtaki::core {

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
  PendingKey& pending = keys.Add(key, now);
  if (source == kSelf) {
    if (pending.self_reported) return nullptr;
    pending.self_reported = true;
  } else {
    if (pending.child_reported.empty()) pending.child_reported.resize(child_members_.size());
    if (pending.child_reported[Index(source)]) return nullptr;
    pending.child_reported[Index(source)] = true;
  }
  if (absent.empty() || (pending.reports > 0 && pending.absent.size() != absent.size())) {
    pending.absent.clear();  // one of them has everything
  } else if (pending.reports == 0) {
    pending.absent = absent;
  } else {
    for (std::size_t i = 0; i < absent.size(); ++i)
      pending.absent[i] = pending.absent[i] && absent[i];
  }
  ++pending.reports;
  pending.silent.Add(silent);
  return &pending;
}

bool SetState::Gone(int source) const {
  if (source == kSelf) return joins.self || left_.Contains(self_);
  if (joins.HasChild(source)) return true;
  return !left_.empty() && left_.ContainsAll(child_members_[Index(source)]);
}

bool SetState::HasReport(const PendingKey& pending, int child) const {
  return !pending.child_reported.empty() && pending.child_reported[Index(child)];
}

bool SetState::HasReport(const Key& key, int child) const {
  if (key.is_join()) return joins.HasChild(child);
  const PendingKey* const pending = keys.Find(key);
  return pending != nullptr && HasReport(*pending, child);
}

bool SetState::Misses(const PendingKey& pending, int source) const {
  if (source == kSelf) return self_member_ && !pending.self_reported && !Gone(kSelf);
  return !HasReport(pending, source) && !Gone(source);
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
  if (AllReported(pending)) return true;
  if (!joins.any() && left_.empty()) return false;  // who has not reported misses it
  return !Misses(pending, kSelf) && std::none_of(children_.begin(), children_.end(),
                                                 [&](int child) { return Misses(pending, child); });
}

void SetState::AddSilent(PendingKey& pending) const {
  if (AllReported(pending)) return;
  if (self_member_ && !pending.self_reported) pending.silent.Add(self_);
  for (const int child : children_) {
    if (!HasReport(pending, child)) {
      pending.silent.Add(child_members_[Index(child)]);
    }
  }
}

std::vector<PendingKey*> SetState::CompleteKeys() {
  std::vector<PendingKey*> complete = keys.Undecided();
  std::erase_if(complete, [this](const PendingKey* pending) { return !Complete(*pending); });
  return complete;
}

void SetState::NoteJoined(int source, int last) {
  if (source == kSelf) {
    joins.self = true;
  } else if (!joins.HasChild(source)) {
    joins.children.push_back(source);
  }
  joins.last = last;
}

void SetState::NoteLeft(const RankRanges& ranks) { left_.Add(ranks.Intersection(*members_)); }

bool SetState::AllJoinedOrLeft() const {
  if (!joins.any()) return false;
  if (self_member_ && !Gone(kSelf)) return false;
  return std::all_of(children_.begin(), children_.end(), [&](int child) { return Gone(child); });
}

void SetState::EndEpoch() {
  joins = {};
  keys.Erase(Key::Join(number_));
}

}  // namespace sirtaki::core
