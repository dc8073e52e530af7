#include "core/protocol/pending_keys.h"

#include <algorithm>

namespace sirtaki::core {

void PendingKey::Merge(const Asked& asked, const std::string& invalid, const RankRanges& ranks) {
  const auto same = std::find_if(variants.begin(), variants.end(), [&](const Variant& known) {
    return known.invalid == invalid && AskTheSame(known.asked, asked);
  });
  if (same != variants.end()) {
    same->ranks.Add(ranks);
  } else if (variants.size() < kMaxVariants) {
    Variant& added = variants.emplace_back();
    added.asked = asked;
    added.invalid = invalid;
    added.ranks = ranks;
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

PendingKey& PendingKeys::Add(const Key& key, TimePoint since) {
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

// Some names are used but once.
void PendingKeys::DropUnused() {
  std::erase_if(keys_, [](const auto& entry) { return entry.second.key == nullptr; });
  most_keys_ = 2 * keys_.size() + kFewestKept;
}

PendingKey* PendingKeys::Find(const Key& key) {
  const auto found = keys_.find(key);
  return found == keys_.end() || found->second.key == nullptr ? nullptr : &found->second;
}

void PendingKeys::Erase(PendingKey& pending) {
  (pending.before == nullptr ? first_ : pending.before->after) = pending.after;
  (pending.after == nullptr ? last_ : pending.after->before) = pending.before;
  if (pending.key->form == Key::Form::kUnnamed) {  // its number does not come again
    keys_.erase(keys_.find(*pending.key));
  } else {
    pending.Reset();
  }
}

std::vector<PendingKey*> PendingKeys::Undecided() {
  std::vector<PendingKey*> keys;
  for (PendingKey* pending = first_; pending != nullptr; pending = pending->after) {
    if (!pending->forwarded) keys.push_back(pending);
  }
  return keys;
}

}  // namespace sirtaki::core
