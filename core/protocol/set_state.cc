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

void PendingKey::Reset() {
  key = nullptr;
  after = nullptr;
  reports = 0;
  self_reported = false;
  forwarded = false;
  told = false;
  std::fill(child_reported.begin(), child_reported.end(), false);
  variants.clear();
  more_variants = 0;
  absent.clear();
  silent.Clear();
  stall.reset();
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
  PendingKey& pending = AddPlaceholder(key, now);
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

PendingKey& SetState::AddPlaceholder(const Key& key, TimePoint since) {
  if (keys_.size() >= most_keys_) DropUnused();
  const auto found = keys_.try_emplace(key).first;
  PendingKey& pending = found->second;
  if (pending.key != nullptr) return pending;
  pending.key = &found->first;
  pending.since = since;
  pending.order = next_order_++;
  pending.before = last_;
  (last_ == nullptr ? first_ : last_->after) = &pending;
  last_ = &pending;
  return pending;
}

// Programs use most names again and again, some but once.
void SetState::DropUnused() {
  std::erase_if(keys_, [](const auto& entry) { return entry.second.key == nullptr; });
  most_keys_ = 2 * keys_.size() + kFewestKept;
}

PendingKey* SetState::Find(const Key& key) {
  const auto found = keys_.find(key);
  return found == keys_.end() || found->second.key == nullptr ? nullptr : &found->second;
}

void SetState::Erase(PendingKey& pending) {
  (pending.before == nullptr ? first_ : pending.before->after) = pending.after;
  (pending.after == nullptr ? last_ : pending.after->before) = pending.before;
  if (pending.key->form == Key::Form::kUnnamed) {  // its number does not come again
    keys_.erase(keys_.find(*pending.key));
  } else {
    pending.Reset();
  }
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
  if (AllReported(pending)) return true;
  return !Misses(pending, kSelf) && std::none_of(children_.begin(), children_.end(),
                                                 [&](int child) { return Misses(pending, child); });
}

void SetState::AddSilent(PendingKey& pending) const {
  if (AllReported(pending)) return;
  if (self_member_ && !pending.self_reported) pending.silent.Add(self_);
  for (const int child : children_) {
    if (pending.child_reported.empty() || !pending.child_reported[Index(child)]) {
      pending.silent.Add(child_members_[Index(child)]);
    }
  }
}

std::vector<PendingKey*> SetState::UndecidedKeys() {
  std::vector<PendingKey*> keys;
  for (PendingKey* pending = first_; pending != nullptr; pending = pending->after) {
    if (!pending->forwarded) keys.push_back(pending);
  }
  return keys;
}

std::vector<PendingKey*> SetState::CompleteKeys() {
  std::vector<PendingKey*> keys = UndecidedKeys();
  std::erase_if(keys, [this](const PendingKey* pending) { return !Complete(*pending); });
  return keys;
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
  Erase(Key::Join(number_));
}

}  // namespace sirtaki::core
