// The part of the negotiator that gives out: the ordered stream of decisions, the ids that
// abbreviate it, and what the engine takes.
#include <algorithm>
#include <iterator>
#include <utility>

#include "core/protocol/mismatch.h"
#include "core/protocol/negotiator.h"

namespace sirtaki::core {
namespace {

// A node that got this many evictions without having had anything to report says so in a bare
// acknowledgement, so that the nodes above can forget them (10).
constexpr std::size_t kEvictionsPerAck = 64;

bool IsChange(const Entry& entry) {
  return std::holds_alternative<AddSetEntry>(entry) ||
         std::holds_alternative<RemoveSetEntry>(entry) ||
         std::holds_alternative<LimitsEntry>(entry) || std::holds_alternative<AssemblyEntry>(entry);
}

}  // namespace

// ---- the stream ----

void Negotiator::CutBatches() {
  for (auto& [number, set] : sets_) CutBatchesOf(set);
}

void Negotiator::CutBatchesOf(SetState& set) {
  if (set.decided.empty()) return;
  std::vector<Entry> all = std::exchange(set.decided, {});
  set.decided.reserve(all.size());  // most often as many come again
  if (std::none_of(all.begin(), all.end(), IsChange)) return CutBatch(set, std::move(all));
  std::vector<Entry> entries;
  for (Entry& entry : all) {
    // An entry that is no collective goes in a batch of its own (7).
    const bool alone = IsChange(entry);
    if (alone && !entries.empty()) CutBatch(set, std::exchange(entries, {}));
    entries.push_back(std::move(entry));
    if (alone) CutBatch(set, std::exchange(entries, {}));
  }
  if (!entries.empty()) CutBatch(set, std::move(entries));
}

void Negotiator::CutBatch(SetState& set, std::vector<Entry> entries) {
  ApplyBatch({set.number(), set.next_batch++, std::move(entries)});
}

void Negotiator::ReceiveStream(StreamMessage stream, TimePoint now) {
  if (stream.first != applied_ + 1) {
    return Protocol(node_.parent, "batch " + std::to_string(stream.first) + " where " +
                                      std::to_string(applied_ + 1) + " was due");
  }
  for (Batch& batch : stream.batches) {
    if (FindSet(batch.set) == nullptr) {
      return Protocol(node_.parent, "a batch of a set without members here");
    }
    ++applied_;
    ApplyBatch(std::move(batch));
    if (faulted()) return;
  }
  Due(now);
}

void Negotiator::ApplyBatch(Batch batch) {
  SetState& set = *FindSet(batch.set);
  for (const Entry& entry : batch.entries) {
    // The decisions in a set that goes run before it goes, also if both were decided in one round.
    const auto* removed = std::get_if<RemoveSetEntry>(&entry);
    SetState* const subject = removed == nullptr ? nullptr : FindSet(removed->set);
    if (subject != nullptr) CutBatchesOf(*subject);
  }
  for (const int child : set.children()) ++children_[static_cast<std::size_t>(child)].sent;
  DecidedBatch decided{batch.set, batch.number, set.shared_members(), {}};
  decided.entries.reserve(batch.entries.size());
  for (const Entry& entry : batch.entries) {
    if (!ApplyEntry(set, entry, decided)) return;
  }
  if (set.self_member() && !decided.entries.empty()) batches_.push_back(std::move(decided));
  if (set.children().empty()) return;
  for (std::size_t i = 0; i + 1 < set.children().size(); ++i) {
    children_[static_cast<std::size_t>(set.children()[i])].unsent.push_back(batch);
  }
  children_[static_cast<std::size_t>(set.children().back())].unsent.push_back(std::move(batch));
}

bool Negotiator::ApplyEntry(SetState& set, const Entry& entry, DecidedBatch& decided) {
  if (const auto* run = std::get_if<RunEntry>(&entry)) return ApplyRun(set, *run, decided);
  if (const auto* fail = std::get_if<FailEntry>(&entry)) {
    if (!MayBeDecided(set, fail->key)) return false;
    if (fail->key == Key::Join(set.number())) set.EndEpoch();
    set.keys.Erase(fail->key);
    decided.entries.push_back(DecidedFail{
        fail->key, Status(fail->code, fail->text, FailOrigin(fail->key, fail->code, fail->text))});
  } else if (const auto* evict = std::get_if<EvictEntry>(&entry)) {
    RememberEviction(set, evict->ids);
  } else if (const auto* join = std::get_if<JoinDoneEntry>(&entry)) {
    set.EndEpoch();
    decided.entries.push_back(DecidedJoin{set.number(), join->last});
  } else if (const auto* added = std::get_if<AddSetEntry>(&entry)) {
    return Apply(*added, decided);
  } else if (const auto* removed = std::get_if<RemoveSetEntry>(&entry)) {
    return Apply(*removed, decided);
  } else if (const auto* limits = std::get_if<LimitsEntry>(&entry)) {
    return Apply(*limits, decided);
  } else if (const auto* assembly = std::get_if<AssemblyEntry>(&entry)) {
    return Pass(*assembly, decided);
  } else {
    end_ = std::max(end_, End::kBye);
  }
  return true;
}

// The world's entries alone change sets, other sets than the world.
bool Negotiator::MayChangeSets(const std::string& what, SetNumber set, const Key& key,
                               const DecidedBatch& decided) {
  if (decided.set == kWorldSet && set != kWorldSet) return MayBeDecided(*FindSet(kWorldSet), key);
  Protocol(node_.parent, "the " + what + " of set " + std::to_string(set) + " in a batch of set " +
                             std::to_string(decided.set));
  return false;
}

bool Negotiator::Apply(const AddSetEntry& entry, DecidedBatch& decided) {
  SetState* world = FindSet(kWorldSet);
  if (!MayChangeSets("addition", entry.set, entry.key, decided)) return false;
  SetState set(entry.set, entry.members, node_, options_.rank);
  if (!RankRanges::Span(0, world_size_ - 1).ContainsAll(entry.members) ||
      sets_.contains(entry.set)) {
    Protocol(node_.parent, "set " + std::to_string(entry.set) + " of ranks " +
                               entry.members.ToString() + ", which cannot be added");
    return false;
  }
  world->keys.Erase(entry.key);
  set_numbers_.insert(entry.set);
  last_set_ = std::max(last_set_, entry.set);
  if (set.relevant()) {
    set.NoteLeft(left_);
    sets_.emplace(entry.set, std::move(set));
  }
  decided.entries.push_back(entry);
  return true;
}

bool Negotiator::Apply(const RemoveSetEntry& entry, DecidedBatch& decided) {
  SetState* world = FindSet(kWorldSet);
  if (!MayChangeSets("removal", entry.set, entry.key, decided)) return false;
  world->keys.Erase(entry.key);
  set_numbers_.erase(entry.set);
  if (SetState* set = FindSet(entry.set)) {
    const auto fail = [&](const Key& key) {
      decided.entries.push_back(
          DecidedFail{key, Status(StatusCode::kInvalidArgument,
                                  key.ToString() + ": the set was removed while it waited",
                                  Origin{-1, {}, TensorName(key)})});
    };
    for (const auto* key = set->keys.Oldest(); key != nullptr; key = key->after) {
      if (key->self_reported) fail(*key->key);
    }
    if (set->joins.self) fail(Key::Join(entry.set));
    ForgetSet(entry.set);
  }
  decided.entries.push_back(entry);
  return true;
}

bool Negotiator::Apply(const LimitsEntry& entry, DecidedBatch& decided) {
  if (decided.set != kWorldSet) {
    Protocol(node_.parent, "limits in a batch of set " + std::to_string(decided.set));
    return false;
  }
  return Pass(entry, decided);
}

template <typename Change>
bool Negotiator::Pass(const Change& entry, DecidedBatch& decided) {
  SetState& set = *FindSet(decided.set);
  if (!MayBeDecided(set, entry.key)) return false;
  set.keys.Erase(entry.key);
  decided.entries.push_back(entry);
  return true;
}

// Items that wait to be sent about the set would find none any more; what is on its way is dropped
// where it arrives.
void Negotiator::ForgetSet(SetNumber number) {
  std::erase_if(up_, [number](const UpItem& item) {
    if (const auto* ready = std::get_if<PendingKey*>(&item)) return (*ready)->key->set == number;
    if (const auto* joined = std::get_if<JoinedItem>(&item)) return joined->set == number;
    const auto* stalled = std::get_if<StalledItem>(&item);
    return stalled != nullptr && stalled->key.set == number;
  });
  std::erase_if(forgetting_, [number](const Forgetting& f) { return f.set == number; });
  stalls_.Forget(number);
  std::erase_if(asked_until_, [number](const auto& asked) { return asked.first.first == number; });
  sets_.erase(number);
}

bool Negotiator::ApplyRun(SetState& set, const RunEntry& run, DecidedBatch& decided) {
  const Key* key = &run.key;
  const SignaturePtr* signature = &run.signature;
  if (run.id != kNoId) {
    const IdTable::Row* row = set.ids.Resolve(run.id);
    if (row == nullptr) {
      Protocol(node_.parent, "id " + std::to_string(run.id) + ", which is not in the table");
      return false;
    }
    if (row->key.form != Key::Form::kUnnamed) key = &row->key;
    signature = &row->signature;
  } else if (*signature == nullptr) {
    Protocol(node_.parent, "an entry without a request");
    return false;
  } else if (run.new_id != kNoId && !set.seat()) {  // the seat knows it since its decision
    if (set.ids.Resolve(run.new_id) != nullptr) {
      Protocol(node_.parent, "id " + std::to_string(run.new_id) + " twice");
      return false;
    }
    set.ids.Insert(run.new_id, *key, *signature);
  }
  PendingKey* const pending = set.keys.Find(*key);
  if (!MayBeDecided(set, *key, pending)) return false;
  if (pending != nullptr) set.keys.Erase(*pending);
  auto& started =
      std::get<DecidedRun>(decided.entries.emplace_back(std::in_place_type<DecidedRun>));
  started.key = *key;
  started.signature = *signature;
  if (!run.silent.empty()) started.silent = run.silent;
  if (!run.absent.empty()) started.absent = run.absent;
  return true;
}

// `pending`: the key's, or null.
bool Negotiator::MayBeDecided(const SetState& set, const Key& key, const PendingKey* pending) {
  // The parent cannot know of what still waits in `up_`.
  const bool known = pending == nullptr || pending->reports == 0 ||
                     (pending->forwarded && (set.seat() || pending->told));
  if (key.set == set.number() && known) return true;
  Protocol(node_.parent, "a decision of " + key.ToString() + ", which is not reported from here");
  return false;
}

void Negotiator::RememberEviction(SetState& set, const std::vector<AgreedId>& ids) {
  Forgetting forgetting;
  forgetting.set = set.number();
  forgetting.ids = ids;
  for (const int child : set.children()) {
    forgetting.positions.emplace_back(child, children_[static_cast<std::size_t>(child)].sent);
  }
  for (const AgreedId id : ids) set.ids.Evict(id);
  if (!set.seat()) evictions_unacknowledged_ += ids.size();
  forgetting_.push_back(std::move(forgetting));
  ForgetAcknowledged();
}

void Negotiator::ForgetAcknowledged() {
  while (!forgetting_.empty()) {
    Forgetting& oldest = forgetting_.front();
    for (const auto& [child, position] : oldest.positions) {
      if (children_[static_cast<std::size_t>(child)].acknowledged < position) return;
    }
    SetState& set = *FindSet(oldest.set);
    for (const AgreedId id : oldest.ids) set.ids.Forget(id);
    forgetting_.pop_front();
  }
}

// ---- what the engine takes ----

ReadyItem Negotiator::WriteReady(PendingKey& pending) {
  const Key& key = *pending.key;
  ReadyItem item;
  item.set = key.set;
  if (!pending.absent.empty()) item.absent = pending.absent;
  if (!pending.silent.empty()) item.silent = pending.silent;
  item.more_variants = pending.more_variants;
  const Variant& first = pending.variants.front();
  const SignaturePtr& signature = CollectiveOf(first.asked);
  const bool all_alike = pending.variants.size() == 1 && pending.more_variants == 0;
  if (all_alike && first.invalid.empty() && signature != nullptr) {
    item.id = FindSet(key.set)->ids.Find(key, *signature);
  }
  if (item.id == kNoId) {
    item.key = key;
    item.variants = std::move(pending.variants);
  } else if (key.form == Key::Form::kUnnamed) {
    item.key = key;
  } else {
    item.key.set = key.set;
  }
  pending.variants.clear();  // the seat has them now
  pending.told = true;
  return item;
}

// One message takes what waits to go up.
void Negotiator::TakeReport(std::vector<Outgoing>* outgoing) {
  if (up_.empty() && evictions_unacknowledged_ < kEvictionsPerAck) return;
  ReportMessage report;
  report.ack = applied_;
  report.items.reserve(up_.size());
  for (UpItem& item : up_) {
    if (const auto* ready = std::get_if<PendingKey*>(&item)) {
      report.items.push_back(WriteReady(**ready));
    } else if (auto* joined = std::get_if<JoinedItem>(&item)) {
      report.items.push_back(*joined);
    } else if (auto* left = std::get_if<LeftItem>(&item)) {
      report.items.push_back(std::move(*left));
    } else {
      report.items.push_back(std::get<StalledItem>(std::move(item)));
    }
  }
  up_.clear();
  evictions_unacknowledged_ = 0;
  outgoing->push_back({node_.parent, std::move(report)});
}

Negotiator::Ready Negotiator::TakeReady(bool with_batches) {
  Ready ready;
  if (faulted()) {
    batches_.clear();  // no entry starts after a fault (15)
  } else {
    CutBatches();
    TakeReport(&ready.outgoing);
    for (Link& link : children_) {
      if (link.unsent.empty()) continue;
      StreamMessage stream;
      stream.first = link.sent - link.unsent.size() + 1;
      stream.batches = std::exchange(link.unsent, {});
      ready.outgoing.push_back({link.rank, std::move(stream)});
    }
  }
  // A question goes behind what was decided before it. Cutting may have raised a fault: that goes too.
  std::move(immediate_.begin(), immediate_.end(), std::back_inserter(ready.outgoing));
  immediate_.clear();
  if (faulted()) batches_.clear();
  if (with_batches) ready.batches = std::exchange(batches_, {});
  ready.warnings = stalls_.TakeWarnings();
  return ready;
}

bool Negotiator::Outstanding() const {
  if (!up_.empty() || !batches_.empty() || !immediate_.empty()) return true;
  if (leaving() && !closed()) return true;
  for (const auto& [number, set] : sets_) {
    if (set.keys.Oldest() != nullptr || !set.decided.empty() || set.joins.self) return true;
  }
  return false;
}

bool Negotiator::Quiescent() const {
  if (!up_.empty() || !batches_.empty() || !immediate_.empty() || stalls_.asks()) return false;
  for (const Link& link : children_) {
    if (!link.unsent.empty()) return false;
  }
  return std::all_of(sets_.begin(), sets_.end(), [](const auto& entry) {
    return entry.second.keys.Oldest() == nullptr && entry.second.decided.empty();
  });
}

std::vector<AgreedId> Negotiator::KnownIds(SetNumber set) const {
  const auto found = sets_.find(set);
  return found == sets_.end() ? std::vector<AgreedId>{} : found->second.ids.LiveIds();
}

}  // namespace sirtaki::core
