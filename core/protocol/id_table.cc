#include "core/protocol/id_table.h"

#include <algorithm>
#include <utility>

namespace sirtaki::core {
namespace {

// Unnamed calls share the ids of their set: the number of the call travels beside the id.
Key TableKey(const Key& key) {
  return key.form == Key::Form::kUnnamed ? Key::Unnamed(key.set, 0) : key;
}

}  // namespace

void IdTable::Insert(AgreedId id, const Key& key, SignaturePtr signature) {
  Key table_key = TableKey(key);
  OfKey& live = live_by_key_[table_key];
  if (live.first.size() < kListed) {
    live.first.push_back(id);
  } else {
    live.more.emplace(SignatureHash()(*signature), id);
  }
  order_.push_back(id);
  rows_.emplace(
      id, Stored{{std::move(table_key), std::move(signature)}, true, std::prev(order_.end())});
}

AgreedId IdTable::Find(const Key& key, const Signature& signature) const {
  const auto found =
      key.form == Key::Form::kUnnamed ? live_by_key_.find(TableKey(key)) : live_by_key_.find(key);
  if (found == live_by_key_.end()) return kNoId;
  const OfKey& live = found->second;
  for (const AgreedId id : live.first) {
    if (IsOf(id, signature)) return id;
  }
  if (live.more.empty()) return kNoId;
  const auto [begin, end] = live.more.equal_range(SignatureHash()(signature));
  const auto same =
      std::find_if(begin, end, [&](const auto& entry) { return IsOf(entry.second, signature); });
  return same == end ? kNoId : same->second;
}

bool IdTable::IsOf(AgreedId id, const Signature& signature) const {
  const SignaturePtr& known = rows_.at(id).row.signature;
  return known.get() == &signature || *known == signature;
}

const IdTable::Row* IdTable::Resolve(AgreedId id) const {
  const auto found = rows_.find(id);
  return found == rows_.end() ? nullptr : &found->second.row;
}

bool IdTable::Evict(AgreedId id) {
  const auto found = rows_.find(id);
  if (found == rows_.end() || !found->second.live) return false;
  found->second.live = false;
  order_.erase(found->second.position);
  const auto by_key = live_by_key_.find(found->second.row.key);
  OfKey& live = by_key->second;
  if (std::erase(live.first, id) == 0) {
    const auto [begin, end] = live.more.equal_range(SignatureHash()(*found->second.row.signature));
    live.more.erase(
        std::find_if(begin, end, [id](const auto& entry) { return entry.second == id; }));
  }
  if (live.first.empty() && live.more.empty()) live_by_key_.erase(by_key);
  return true;
}

void IdTable::Forget(AgreedId id) {
  Evict(id);
  rows_.erase(id);
}

void IdTable::Touch(AgreedId id) {
  const auto found = rows_.find(id);
  if (found == rows_.end() || !found->second.live) return;
  order_.splice(order_.end(), order_, found->second.position);
}

AgreedId IdTable::LeastRecentlyRun() const { return order_.front(); }

std::vector<AgreedId> IdTable::LiveIds() const {
  std::vector<AgreedId> ids(order_.begin(), order_.end());
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace sirtaki::core
