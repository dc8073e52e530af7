// The messages of the negotiation, as values. docs/protocol.md is the rule book;
// core/protocol/wire turns them into bytes and back.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/protocol/request.h"

namespace sirtaki::core {

// The first thing that went wrong, told to everyone.
struct Cause {
  StatusCode code = StatusCode::kAborted;
  std::string text;
  int rank = -1;  // where it was seen first
  std::string host;
  std::string key;           // the tensor it concerns, if one: TensorName
  std::int64_t unix_us = 0;  // wall clock of its origin, microseconds since 1970
  bool operator==(const Cause&) const = default;
  Status ToStatus() const;
};

// TensorName is what Origin::tensor says of work with this key: its name as the program gave it,
// "unnamed call #7", "bucket 3 of arena 0"; nothing for a join.
std::string TensorName(const Key& key);

// A variant is what some ranks asked for under one key, or why the request is invalid.
struct Variant {
  Asked asked;
  std::string invalid;
  RankRanges ranks;
};

// ---- items of a Report (up) ----

// A key is ready in the whole subtree of the sender. Either by id (`id` set; `key` set only for
// unnamed work, whose id stands for the signature) or whole (`id` is kNoId, key and variants are
// set).
struct ReadyItem {
  SetNumber set = kWorldSet;
  AgreedId id = kNoId;
  Key key;
  std::vector<Variant> variants;    // at most kMaxVariants; by id: empty
  std::uint32_t more_variants = 0;  // groups beyond those carried
  std::vector<bool> absent;         // AND over the subtree; empty: all present
  RankRanges silent;                // counted though they did not report this use
};
inline constexpr std::size_t kMaxVariants = 16;

// All members of the set in the sender's subtree have joined or left; `last` arrived last.
struct JoinedItem {
  SetNumber set = kWorldSet;
  int last = -1;
};
struct LeftItem {
  RankRanges ranks;
  std::string why;
};
// Somebody below waits for this key longer than the warning time: the seat is to find out why.
struct StalledItem {
  Key key;
  std::int64_t waited_us = 0;
  std::int64_t limit_us = 0;  // not 0: the call's own time, which is over, so that it is a fault
  bool reported = false;      // by its sender, before: where it waits no more, it is decided
};
using ReportItem = std::variant<ReadyItem, JoinedItem, LeftItem, StalledItem>;

// `ack`: how many batches of the downward stream the sender has applied.
struct ReportMessage {
  std::uint64_t ack = 0;
  std::vector<ReportItem> items;
};

// ---- entries of a Stream (down) ----

// Run the collective of this key now. By a known id, or whole, perhaps giving a new id.
struct RunEntry {
  AgreedId id = kNoId;  // known id; then signature is null and key is set for unnamed work only
  AgreedId new_id = kNoId;
  Key key;
  SignaturePtr signature;
  std::vector<bool> absent;
  RankRanges silent;
};
// A decided run is the entry with everything resolved: no id is left.
struct DecidedRun {
  Key key;
  SignaturePtr signature;
  RankRanges silent = {};         // members that take part from scratch memory
  std::vector<bool> absent = {};  // by part: no rank has it, and it is not moved; empty: all are
};
struct FailEntry {
  Key key;
  StatusCode code = StatusCode::kMismatch;
  std::string text;
};
struct EvictEntry {
  std::vector<AgreedId> ids;
};
struct JoinDoneEntry {
  int last = -1;
};
// An entry that is no collective is in a batch of its own (7). The key is that of the request that
// asked for it. A set comes or goes by an entry of the world.
struct AddSetEntry {
  Key key;
  SetNumber set = kWorldSet;
  RankRanges members;
};
struct RemoveSetEntry {
  Key key;
  SetNumber set = kWorldSet;
};
// The entry says with which limits the world's ranks plan from here on.
struct LimitsEntry {
  Key key;
  Limits limits;
};
// All members are here.
struct AssemblyEntry {
  Key key;
};
// All ranks have left: finish what runs, acknowledge, wait for the confirmation.
struct ByeEntry {};
using Entry = std::variant<RunEntry, FailEntry, EvictEntry, JoinDoneEntry, ByeEntry, AddSetEntry,
                           RemoveSetEntry, LimitsEntry, AssemblyEntry>;

// `number` counts the batches of the set, from 1.
struct Batch {
  SetNumber set = kWorldSet;
  std::uint64_t number = 0;
  std::vector<Entry> entries;
};

// `first`: the number of the first batch on this link, from 1.
struct StreamMessage {
  std::uint64_t first = 1;
  std::vector<Batch> batches;
};

// ---- outside the order ----

// An activity is what a rank last did, as the answer to a stall query.
struct RankActivity {
  int rank = -1;
  std::string text;
  std::optional<Key> waits_for;  // the rank submits nothing before this one ends
};
inline constexpr std::size_t kMaxActivities = 16;

// `number`: of the asker's questions about stalls; an answer to an earlier one counts no more. 0: it
// is about an operation that runs.
struct QueryMessage {
  Key key;
  std::uint64_t number = 0;
};
struct AnswerMessage {
  Key key;
  std::uint64_t number = 0;
  RankRanges missing;
  std::vector<RankActivity> activities;
};
struct PingMessage {
  SetNumber set = kWorldSet;
};
struct PongMessage {
  SetNumber set = kWorldSet;
};
struct FaultMessage {
  Cause cause;
};
struct ByeAckMessage {};      // up: this subtree has drained
struct ByeConfirmMessage {};  // down: the parent knows; close

using MessageBody =
    std::variant<ReportMessage, StreamMessage, QueryMessage, AnswerMessage, PingMessage,
                 PongMessage, FaultMessage, ByeAckMessage, ByeConfirmMessage>;

// `session` tells messages of this init() from those of an earlier one.
struct Message {
  std::uint64_t session = 0;
  MessageBody body;
};

}  // namespace sirtaki::core
