#include "core/protocol/negotiator.h"

#include <algorithm>
#include <utility>

#include "core/protocol/mismatch.h"

namespace sirtaki::core {
namespace {

// The world rank of the root, which all tensors of a grouped call have; -1: there is none.
std::int32_t RootOf(const Signature& signature) {
  return signature.parts.empty() ? signature.root : signature.parts.front()->root;
}

}  // namespace

Negotiator::Negotiator(NegotiatorOptions options, const Tree& tree)
    : options_(std::move(options)),
      node_(tree.NodeOf(options_.rank)),
      world_size_(tree.size()),
      liveness_(options_.ping_interval, options_.peer_timeout),
      stalls_(options_, node_, world_size_, *this) {
  for (const auto& [number, members] : options_.sets) {
    SetState set(number, members, node_, options_.rank);
    if (set.relevant()) sets_.emplace(number, std::move(set));
    set_numbers_.insert(number);
    last_set_ = std::max(last_set_, number);
  }
  for (const int child : node_.children) {
    Link link;
    link.rank = child;
    children_.push_back(std::move(link));
  }
}

SetState* Negotiator::FindSet(SetNumber set) {
  const auto found = sets_.find(set);
  return found == sets_.end() ? nullptr : &found->second;
}

int Negotiator::ChildIndex(int rank) const {
  const auto found = std::lower_bound(node_.children.begin(), node_.children.end(), rank);
  if (found == node_.children.end() || *found != rank) return -1;
  return static_cast<int>(found - node_.children.begin());
}

std::vector<std::pair<SetNumber, RankRanges>> Negotiator::MemberSets() const {
  std::vector<std::pair<SetNumber, RankRanges>> sets;
  for (const auto& [number, set] : sets_) {
    if (set.self_member()) sets.emplace_back(number, set.members());
  }
  return sets;
}

bool Negotiator::IsMember(SetNumber set) const {
  const auto found = sets_.find(set);
  return found != sets_.end() && found->second.self_member();
}

// Reports of such a set may still be on their way up when its removal comes down.
bool Negotiator::IsGone(SetNumber set) const {
  return set <= last_set_ && !set_numbers_.contains(set);
}

// ---- this rank ----

void Negotiator::Submit(const Request& request, TimePoint now) {
  if (faulted()) return;
  SetState* set = FindSet(request.key.set);
  if (set == nullptr || !set->self_member()) {
    RaiseFault(StatusCode::kProtocol, "a request for a set that this rank is not in",
               TensorName(request.key));
    return;
  }
  PendingKey* const pending = set->AddReport(request.key, kSelf, request.absent, {}, now);
  if (pending == nullptr) {
    RaiseFault(StatusCode::kProtocol, "a second request while the first is in flight",
               TensorName(request.key));
    return;
  }
  pending->Merge(request.asked, request.invalid, RankRanges::Single(options_.rank));
  Advance(*set, *pending);
  Due(now + options_.ping_interval);
}

void Negotiator::Join(SetNumber number, TimePoint now) {
  SetState* set = FindSet(number);
  if (faulted() || set == nullptr || !set->self_member()) return;
  set->NoteJoined(kSelf, options_.rank);
  set->joins.self_since = now;
  // Nobody reports it, but it waits like any other key (18).
  set->keys.Add(Key::Join(number), now);
  AdvanceAfterDeparture(*set);
  Due(now + options_.ping_interval);
}

void Negotiator::Leave(const std::string& why, TimePoint now) {
  if (faulted() || leaving()) return;
  left_since_ = now;
  left_why_.emplace_back(RankRanges::Single(options_.rank), why);
  NoteLeft(RankRanges::Single(options_.rank), why);
  Due(now + options_.ping_interval);
}

void Negotiator::RaiseFault(const Status& why) {
  const Origin& origin = why.origin();
  const bool here = origin.rank < 0;
  AdoptFault({why.code(), why.message(), here ? options_.rank : origin.rank,
              here ? options_.host : origin.host, origin.tensor, options_.unix_us()},
             -1);
}

void Negotiator::AdoptFault(Cause cause, int from) {
  // Several may begin at once: the earliest is what everybody shows in the end, so it goes on
  // through nodes that know a later one. It ends, since causes only get earlier (15).
  const auto age = [](const Cause& c) { return std::make_pair(c.unix_us, c.rank); };
  if (cause_ && age(cause) >= age(*cause_)) return;
  cause_ = std::move(cause);
  if (from < 0 && options_.reaches_all) {
    // A rank that learns of the fault by the tree alone may see first that others, which knew it, have gone.
    for (int rank = 0; rank < world_size_; ++rank) {
      if (rank != options_.rank) SendNow(rank, FaultMessage{*cause_});
    }
    return;
  }
  if (node_.parent >= 0 && node_.parent != from) SendNow(node_.parent, FaultMessage{*cause_});
  for (const Link& child : children_) {
    if (child.rank != from) SendNow(child.rank, FaultMessage{*cause_});
  }
}

void Negotiator::Protocol(int from, const std::string& what) {
  RaiseFault(StatusCode::kProtocol, "rank " + std::to_string(from) + " sent " + what, "");
}

// ---- messages ----

void Negotiator::Receive(int from, MessageBody body, TimePoint now) {
  if (auto* fault = std::get_if<FaultMessage>(&body))
    return AdoptFault(std::move(fault->cause), from);
  const int child = ChildIndex(from);
  if (child < 0 && from != node_.parent) {
    if (!faulted()) Protocol(from, "a message although it is not a neighbour in the tree");
    return;
  }
  liveness_.Heard(from, now);
  if (faulted() || closed()) return;

  const bool from_child = child >= 0;
  if (auto* report = std::get_if<ReportMessage>(&body); report && from_child) {
    ReceiveReport(child, std::move(*report), now);
  } else if (auto* stream = std::get_if<StreamMessage>(&body); stream && !from_child) {
    ReceiveStream(std::move(*stream), now);
  } else if (auto* query = std::get_if<QueryMessage>(&body); query && !from_child) {
    SetState* const set = FindSet(query->key.set);
    if (IsGone(query->key.set)) return;
    if (set == nullptr) return Protocol(from, "a query for a set without members here");
    stalls_.Receive(*set, *query, now);
  } else if (auto* answer = std::get_if<AnswerMessage>(&body); answer && from_child) {
    SetState* const set = FindSet(answer->key.set);
    if (IsGone(answer->key.set)) return;
    if (set == nullptr) return Protocol(from, "an answer for an unknown set");
    stalls_.Receive(*set, child, std::move(*answer), now);
  } else if (auto* ping = std::get_if<PingMessage>(&body)) {
    SendNow(from, PongMessage{ping->set});
    if (FindSet(ping->set) != nullptr) {
      // Renewed by the next ping; twice the interval, so that the wait has no gap in between.
      asked_until_[{ping->set, from}] = now + 2 * options_.ping_interval;
      Due(now);
    }
  } else if (std::holds_alternative<PongMessage>(body)) {
    // Heard() above is all that it is for.
  } else if (std::holds_alternative<ByeAckMessage>(body) && from_child) {
    children_[static_cast<std::size_t>(child)].bye_acknowledged = true;
    Due(now);
  } else if (std::holds_alternative<ByeConfirmMessage>(body) && !from_child &&
             end_ >= End::kAcknowledged) {
    for (const Link& link : children_) SendNow(link.rank, ByeConfirmMessage{});
    end_ = End::kClosed;
  } else {
    Protocol(from, "a message that does not fit its place in the tree");
  }
}

void Negotiator::ReceiveReport(int child, ReportMessage report, TimePoint now) {
  Link& link = children_[static_cast<std::size_t>(child)];
  if (report.ack < link.acknowledged || report.ack > link.sent) {
    return Protocol(link.rank, "an acknowledgement that is out of range");
  }
  link.acknowledged = report.ack;
  // Departures are known before any item is judged: a key that a departure completed stands before
  // the departure in the report (3), and must fail for it all the same (16).
  for (const ReportItem& item : report.items) {
    if (const auto* left = std::get_if<LeftItem>(&item)) {
      if (!node_.child_subtrees[static_cast<std::size_t>(child)].ContainsAll(left->ranks)) {
        return Protocol(link.rank, "the departure of a rank that is not below it");
      }
      left_.Add(left->ranks);
      left_why_.emplace_back(left->ranks, left->why);
    }
  }
  for (ReportItem& item : report.items) {
    if (auto* ready = std::get_if<ReadyItem>(&item)) {
      if (!ReceiveReady(child, *ready, now)) return;
    } else if (auto* joined = std::get_if<JoinedItem>(&item)) {
      SetState* set = FindSet(joined->set);
      if (IsGone(joined->set)) continue;
      if (set == nullptr || set->child_members(child).empty()) {
        return Protocol(link.rank, "a join of a set that it has no members of");
      }
      set->NoteJoined(child, joined->last);
      AdvanceAfterDeparture(*set);
    } else if (auto* left = std::get_if<LeftItem>(&item)) {
      NoteLeft(left->ranks, left->why);
      Due(now);
    } else if (auto* stalled = std::get_if<StalledItem>(&item)) {
      SetState* set = FindSet(stalled->key.set);
      if (IsGone(stalled->key.set)) continue;
      if (set == nullptr) return Protocol(link.rank, "a stall of an unknown set");
      // A later use of the key is not late because the one before was.
      if (stalled->reported && !set->HasReport(stalled->key, child)) continue;
      stalls_.Receive(*set, *stalled, now);
    }
  }
  ForgetAcknowledged();
}

bool Negotiator::ReceiveReady(int child, ReadyItem& item, TimePoint now) {
  const int from = children_[static_cast<std::size_t>(child)].rank;
  SetState* set = FindSet(item.set);
  if (IsGone(item.set)) return true;
  if (set == nullptr || set->child_members(child).empty()) {
    Protocol(from, "a report for a set that it has no members of");
    return false;
  }
  const Key* key = &item.key;
  const IdTable::Row* row = nullptr;
  if (item.id != kNoId) {
    row = set->ids.Resolve(item.id);
    if (row == nullptr) {
      Protocol(from, "id " + std::to_string(item.id) + ", which is not in the table");
      return false;
    }
    if (row->key.form != Key::Form::kUnnamed) {
      key = &row->key;
    } else if (item.key.form != Key::Form::kUnnamed || item.key.set != item.set) {
      Protocol(from, "an id for an unnamed call without the call's number");
      return false;
    }
  } else if (item.variants.empty() || item.key.set != item.set) {
    Protocol(from, "a report without a request");
    return false;
  }
  if (!item.silent.empty() && item.silent.ContainsAll(set->child_members(child))) {
    Protocol(from, "a report that none of its members has made");
    return false;
  }
  PendingKey* const pending = set->AddReport(*key, child, item.absent, item.silent, now);
  if (pending == nullptr) {
    Protocol(from, "a second report of " + key->ToString());
    return false;
  }
  if (row == nullptr) {
    for (const Variant& v : item.variants) pending->Merge(v.asked, v.invalid, v.ranks);
    pending->more_variants += item.more_variants;
  } else if (item.silent.empty()) {
    pending->Merge(row->signature, {}, set->child_members(child));
  } else {
    RankRanges ranks = set->child_members(child);
    ranks.Remove(item.silent);
    pending->Merge(row->signature, {}, ranks);
  }
  Advance(*set, *pending);
  return true;
}

// ---- reports: forward once, or decide ----

void Negotiator::Advance(SetState& set, PendingKey& pending) {
  if (pending.forwarded) return;
  if (!set.Complete(pending)) {
    // A wait has begun, also after a departure that did not complete it.
    return stalls_.NoteWait(pending);
  }
  set.AddSilent(pending);
  if (set.seat()) {
    Decide(set, pending);
  } else {
    pending.forwarded = true;
    up_.push_back(&pending);
  }
}

void Negotiator::AdvanceAfterDeparture(SetState& set) {
  // The keys first: what was reported before the departure is told before it (3).
  for (PendingKey* const pending : set.CompleteKeys()) Advance(set, *pending);
  if (set.joins.told || !set.AllJoinedOrLeft()) return;
  set.joins.told = true;
  if (PendingKey* join = set.keys.Find(Key::Join(set.number()))) join->forwarded = true;
  const RankRanges left = left_.Intersection(set.members());
  if (!set.seat()) {
    up_.push_back(JoinedItem{set.number(), set.joins.last});
  } else if (left.empty()) {
    set.decided.push_back(JoinDoneEntry{set.joins.last});
  } else {
    set.decided.push_back(
        FailEntry{Key::Join(set.number()), StatusCode::kShutDown, "join: " + LeftText(left)});
  }
}

void Negotiator::NoteLeft(const RankRanges& ranks, const std::string& why) {
  left_.Add(ranks);
  for (auto& [number, set] : sets_) {
    if (!set.members().Intersects(ranks)) continue;
    set.NoteLeft(ranks);
    AdvanceAfterDeparture(set);
  }
  if (node_.parent >= 0) {
    up_.push_back(LeftItem{ranks, why});
  } else if (left_.Count() == world_size_) {
    if (SetState* world = FindSet(kWorldSet)) world->decided.push_back(ByeEntry{});
  }
}

std::string Negotiator::LeftText(const RankRanges& ranks) const {
  std::string text;
  for (const auto& [who, why] : left_why_) {
    const RankRanges here = who.Intersection(ranks);
    if (here.empty()) continue;
    text += (text.empty() ? "" : "; ") + RanksText(here) +
            (here.Count() == 1 ? " has shut down: " : " have shut down: ") + why;
  }
  return text;
}

void Negotiator::Decide(SetState& set, PendingKey& pending) {
  const Key& key = *pending.key;
  const RankRanges left =
      pending.silent.empty() ? RankRanges() : pending.silent.Intersection(left_);
  const Variant& first = pending.variants.front();
  const SignaturePtr& signature = CollectiveOf(first.asked);
  if (!left.empty()) {
    set.decided.push_back(
        FailEntry{key, StatusCode::kShutDown, key.ToString() + ": " + LeftText(left)});
  } else if (pending.variants.size() > 1 || pending.more_variants > 0 || !first.invalid.empty()) {
    StatusCode code = StatusCode::kMismatch;
    for (const Variant& variant : pending.variants) {
      if (variant.invalid.empty() || code == StatusCode::kRefused) continue;
      code = std::holds_alternative<Refusal>(variant.asked) ? StatusCode::kRefused
                                                            : StatusCode::kInvalidArgument;
    }
    set.decided.push_back(
        FailEntry{key, code, MismatchText(key, pending.variants, pending.more_variants)});
  } else if (signature == nullptr) {
    set.decided.push_back(DecideChange(key, first.asked, pending));
  } else if (const std::int32_t root = RootOf(*signature);
             root >= 0 && pending.silent.Contains(root)) {
    set.decided.push_back(
        FailEntry{key, StatusCode::kInvalidArgument,
                  key.ToString() + ": the root, rank " + std::to_string(root) + ", has joined"});
  } else {
    auto& run = std::get<RunEntry>(set.decided.emplace_back(std::in_place_type<RunEntry>));
    run.absent = std::move(pending.absent);
    run.silent = std::move(pending.silent);
    run.id = set.ids.Use(key, *signature);
    if (run.id != kNoId) {
      if (key.form == Key::Form::kUnnamed) run.key = key;
    } else {
      run.key = key;
      run.signature = signature;
      if (options_.id_capacity > 0) {
        run.new_id = set.next_id++;
        // Known from its decision, so that a second key of this step with the same request gets it;
        // the members know it from its place in the stream.
        set.ids.Insert(run.new_id, key, signature);
      }
    }
    EvictOverCapacity(set);
  }
  pending.forwarded = true;  // decided; erased when its entry takes its place in the stream
}

// The root decides changes; an assembly is decided by the seat of its set.
Entry Negotiator::DecideChange(const Key& key, const Asked& change, const PendingKey& pending) {
  const auto refuse = [&](const std::string& why) {
    return FailEntry{key, StatusCode::kInvalidArgument,
                     std::string(KindName(change)) + " " + key.ToString() + ": " + why};
  };
  const bool some_joined = !pending.silent.empty();
  if (std::holds_alternative<Assembly>(change)) {
    if (!some_joined) return AssemblyEntry{key};
    return FailEntry{
        key, StatusCode::kInvalidArgument,
        key.ToString() + ": " + RanksText(pending.silent) + " has joined, and does not take part"};
  }
  if (key.set != kWorldSet) return refuse("only the world can do that");
  if (const auto* limits = std::get_if<Limits>(&change)) return LimitsEntry{key, *limits};
  if (some_joined) return refuse(RanksText(pending.silent) + " has joined");
  if (const auto* removed = std::get_if<RemoveSet>(&change)) {
    if (removed->set == kWorldSet || set_numbers_.erase(removed->set) == 0) {
      return refuse("there is no process set " + std::to_string(removed->set) + " to be removed");
    }
    return RemoveSetEntry{key, removed->set};
  }
  const RankRanges& members = std::get<AddSet>(change).members;
  const RankRanges world = RankRanges::Span(0, world_size_ - 1);
  if (members.empty() || !world.ContainsAll(members)) {
    return refuse("ranks " + members.ToString() + " are not all among " + world.ToString());
  }
  // The number is taken at once: another set may be decided before this one takes its place in the
  // stream.
  set_numbers_.insert(++last_set_);
  return AddSetEntry{key, last_set_, members};
}

void Negotiator::EvictOverCapacity(SetState& set) {
  while (set.ids.live() > std::max<std::size_t>(options_.id_capacity, 1)) {
    const AgreedId oldest = set.ids.LeastRecentlyRun();
    set.ids.Evict(oldest);
    set.decided.push_back(EvictEntry{{oldest}});
  }
}

}  // namespace sirtaki::core
