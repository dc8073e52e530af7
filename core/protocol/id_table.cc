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
  order_.push_back(id);
  const Stored& stored =
      rows_
          .emplace(id, Stored{{TableKey(key), std::move(signature)}, true, std::prev(order_.end())})
          .first->second;
  OfKey& live = live_by_key_[stored.row.key];
  if (live.first.size() < kListed) {
    live.first.push_back(&stored);
  } else {
    live.more.emplace(SignatureHash()(*stored.row.signature), &stored);
  }
}

AgreedId IdTable::Find(const Key& key, const Signature& signature) const {
  const Stored* const live = FindLive(key, signature);
  return live == nullptr ? kNoId : *live->position;
}

AgreedId IdTable::Use(const Key& key, const Signature& signature) {
  const Stored* const live = FindLive(key, signature);
  if (live == nullptr) return kNoId;
  order_.splice(order_.end(), order_, live->position);
  return *live->position;
}

const IdTable::Stored* IdTable::FindLive(const Key& key, const Signature& signature) const {
  const auto is_same = [&signature](const Stored* live) {
    const SignaturePtr& known = live->row.signature;
    return known.get() == &signature || *known == signature;
  };
  const auto found =
      key.form == Key::Form::kUnnamed ? live_by_key_.find(TableKey(key)) : live_by_key_.find(key);
  if (found == live_by_key_.end()) return nullptr;
  const OfKey& of_key = found->second;
  const auto listed = std::find_if(of_key.first.begin(), of_key.first.end(), is_same);
  if (listed != of_key.first.end()) return *listed;
  if (of_key.more.empty()) return nullptr;
  const auto [begin, end] = of_key.more.equal_range(SignatureHash()(signature));
  const auto same =
      std::find_if(begin, end, [&](const auto& entry) { return is_same(entry.second); });
  return same == end ? nullptr : same->second;
}

const IdTable::Row* IdTable::Resolve(AgreedId id) const {
  const auto found = rows_.find(id);
  return found == rows_.end() ? nullptr : &found->second.row;
}

bool IdTable::Evict(AgreedId id) {
  const auto found = rows_.find(id);
  if (found == rows_.end() || !found->second.live) return false;
  Stored& stored = found->second;
  stored.live = false;
  order_.erase(stored.position);
  const auto by_key = live_by_key_.find(stored.row.key);
  OfKey& live = by_key->second;
  if (std::erase(live.first, &stored) == 0) {
    const auto [begin, end] = live.more.equal_range(SignatureHash()(*stored.row.signature));
    live.more.erase(
        std::find_if(begin, end, [&stored](const auto& entry) { return entry.second == &stored; }));
  }
  if (live.first.empty() && live.more.empty()) live_by_key_.erase(by_key);
  return true;
}

void IdTable::Forget(AgreedId id) {
  Evict(id);
  rows_.erase(id);
}

AgreedId IdTable::LeastRecentlyRun() const { return order_.front(); }

std::vector<AgreedId> IdTable::LiveIds() const {
  std::vector<AgreedId> ids(order_.begin(), order_.end());
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace sirtaki::core
