// The agreed ids of one process set at one node: id -> (key, signature) and back. An id abbreviates
// a request and nothing else. Every node between a member and the set's seat keeps the table; equal
// stream positions have equal live rows (rules 8-10).
#pragma once

#include <cstddef>
#include <list>
#include <unordered_map>
#include <vector>

#include "core/protocol/request.h"

namespace sirtaki::core {

class IdTable {
 public:
  struct Row {
    Key key;  // for unnamed work: without the call's number, the id stands for (set, signature)
    SignaturePtr signature;
  };

  void Insert(AgreedId id, const Key& key, SignaturePtr signature);
  // The live id of this request, kNoId if there is none. Use makes it the one that was run last.
  AgreedId Find(const Key& key, const Signature& signature) const;
  AgreedId Use(const Key& key, const Signature& signature);
  // Live, or evicted and not forgotten. Null if unknown.
  const Row* Resolve(AgreedId id) const;
  // Find no longer gives it; Resolve still knows it, for children that have not applied the
  // eviction. False if it was not live.
  bool Evict(AgreedId id);
  void Forget(AgreedId id);

  AgreedId LeastRecentlyRun() const;  // by the seat's order of use; precondition: live() > 0

  std::size_t live() const { return order_.size(); }
  std::vector<AgreedId> LiveIds() const;  // ascending

 private:
  struct Stored {
    Row row;
    bool live = true;
    std::list<AgreedId>::iterator position;
  };
  // The live ids of one key. A key rarely has several signatures: a short list saves hashing these.
  // But the unnamed calls of a set share a key, and may have as many signatures as there are ids.
  struct OfKey {
    std::vector<const Stored*> first;                          // kListed at most
    std::unordered_multimap<std::size_t, const Stored*> more;  // by the signature's hash
  };
  static constexpr std::size_t kListed = 8;

  const Stored* FindLive(const Key& key, const Signature& signature) const;

  std::unordered_map<AgreedId, Stored> rows_;
  std::unordered_map<Key, OfKey, KeyHash> live_by_key_;
  std::list<AgreedId> order_;  // least recently run first
};

}  // namespace sirtaki::core
