#include "tests/core/protocol/random_messages.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <memory>
#include <sstream>

#include "core/protocol/wire.h"

namespace sirtaki::core {

std::uint64_t RandomMessages::Number() {
  if (Below(50) == 0) return std::numeric_limits<std::uint64_t>::max();
  return random_() >> Below(64);
}

std::string RandomMessages::Text() {
  std::string text;
  for (std::uint64_t i = Below(12); i > 0; --i) text.push_back(static_cast<char>(Below(256)));
  return text;
}

std::string RandomMessages::Name() {
  if (Below(40) == 0) {
    std::string longest;
    longest.resize(kMaxNameBytes, 'n');
    return longest;
  }
  return "layer" + Text();
}

RankRanges RandomMessages::Ranks() { return Coin() ? RankRanges() : SomeRanks(); }

RankRanges RandomMessages::SomeRanks() {
  RankRanges ranks;
  const int shift = static_cast<int>(Below(29));
  for (std::uint64_t i = Below(6) + 1; i > 0; --i) {
    const int first = static_cast<int>((random_() & 0x7fffffff) >> shift);
    const int length = static_cast<int>(Below(5));
    ranks.Add(RankRanges::Span(
        first, first > std::numeric_limits<int>::max() - length ? first : first + length));
  }
  return ranks;
}

SetNumber RandomMessages::Set() {
  return Coin() ? kWorldSet : static_cast<SetNumber>(random_() >> (32 + Below(32)));
}

int RandomMessages::Member() { return static_cast<int>((random_() & 0x7fffffff) >> Below(31)) - 1; }

StatusCode RandomMessages::Failure() {
  return static_cast<StatusCode>(1 + Below(static_cast<std::uint64_t>(kLastStatusCode)));
}

Key RandomMessages::AnyKey(SetNumber set) {
  switch (Below(3)) {
    case 0:
      return Key::Named(set, Name());
    case 1:
      return Key::Unnamed(set, Number());
    default:
      return Key::Bucket(set, Number(), Number());
  }
}

SignaturePtr RandomMessages::AnySignature(bool is_part) {
  auto signature = std::make_shared<Signature>();
  signature->kind = static_cast<OpKind>(Below(kOpKindCount));
  signature->reduction = static_cast<ReduceOp>(Below(kReduceOpCount));
  signature->dtype = static_cast<DType>(Below(kDTypeCount));
  signature->device = static_cast<DeviceKind>(Below(kDeviceKindCount));
  if (Coin()) signature->wire = static_cast<DType>(Below(kDTypeCount));
  if (Coin()) signature->slot = static_cast<std::uint32_t>(random_());
  if (Coin()) signature->root = static_cast<std::int32_t>(random_());
  if (Coin()) signature->prescale = std::bit_cast<double>(random_());  // NaNs among them
  if (Coin()) signature->postscale = 0.25;
  if (Coin()) signature->layout = random_();
  if (Below(4) == 0) signature->round = static_cast<std::uint32_t>(random_());
  for (std::uint64_t i = is_part || Coin() ? 0 : Below(4); i > 0; --i) {
    signature->parts.push_back(AnySignature(/*is_part=*/true));
  }
  const std::uint64_t dimensions = Below(20) == 0 ? kMaxDimensions : Below(5);
  for (std::uint64_t i = 0; i < dimensions; ++i) {
    signature->shape.push_back(static_cast<std::int64_t>(Number() >> 1));
  }
  return signature;
}

Limits RandomMessages::AnyLimits() {
  const auto number = [this] { return static_cast<std::int64_t>(Number() >> 1); };
  Limits limits{number(), number(), number(),
                number(), number(), number() % (std::int64_t{1} << 40)};
  limits.chunk_bytes |= 1;
  return limits;
}

Asked RandomMessages::AnythingAsked() {
  switch (Below(8)) {
    case 0:
      return AddSet{Ranks()};
    case 1:
      return RemoveSet{Set()};
    case 2:
      return AnyLimits();
    case 3:
      return Assembly{};
    default:
      return AnySignature();
  }
}

std::vector<bool> RandomMessages::Absent() {
  std::vector<bool> absent(Coin() ? 0 : Below(40));
  for (auto bit : absent) bit = Coin();
  return absent;
}

ReportItem RandomMessages::Item() {
  switch (Below(5)) {
    case 0: {
      const SetNumber set = Set();
      return JoinedItem{set, Member()};
    }
    case 1:
      return LeftItem{SomeRanks(), Text()};
    case 2:
      return StalledItem{AnyKey(Set()), static_cast<std::int64_t>(Number() >> 1),
                         static_cast<std::int64_t>(Number() >> 1), Below(2) == 1};
    default:
      break;
  }
  ReadyItem item;
  item.set = Set();
  item.absent = Absent();
  item.silent = Ranks();
  if (Coin()) {
    item.id = Number() | 1;
    if (Coin()) item.key = Key::Unnamed(item.set, Number());
    return item;
  }
  item.key = AnyKey(item.set);
  for (std::uint64_t i = Below(8) == 0 ? kMaxVariants : 1 + Below(3); i > 0; --i) {
    Variant variant;
    variant.ranks = SomeRanks();
    if (Coin()) variant.invalid = "not contiguous" + Text();
    if (variant.invalid.empty() || Coin()) variant.asked = AnythingAsked();
    if (!variant.invalid.empty() && Below(8) == 0) variant.asked = Refusal{};
    item.variants.push_back(variant);
  }
  if (Coin()) item.more_variants = static_cast<std::uint32_t>(random_());
  return item;
}

Entry RandomMessages::AnyEntry(SetNumber set) {
  switch (Below(8)) {
    case 0:
      return FailEntry{AnyKey(set), Failure(), Text()};
    case 1: {
      EvictEntry entry;
      for (std::uint64_t i = Below(5); i > 0; --i) entry.ids.push_back(Number() | 1);
      return entry;
    }
    case 2:
      return JoinDoneEntry{Member()};
    case 3:
      return ByeEntry{};
    case 4:
      return AddSetEntry{AnyKey(set), Set(), SomeRanks()};
    case 5:
      return RemoveSetEntry{AnyKey(set), Set()};
    default:
      break;
  }
  RunEntry entry;
  entry.absent = Absent();
  entry.silent = Ranks();
  if (Coin()) {
    entry.id = Number() | 1;
    if (Coin()) entry.key = Key::Unnamed(set, Number());
  } else {
    entry.key = AnyKey(set);
    entry.signature = AnySignature();
    if (Coin()) entry.new_id = Number();
  }
  return entry;
}

MessageBody RandomMessages::Body() {
  switch (Below(13)) {
    case 0:
      return QueryMessage{AnyKey(Set()), Number()};
    case 1: {
      AnswerMessage answer{AnyKey(Set()), Number(), Ranks(), {}};
      for (std::uint64_t i = Below(8) == 0 ? kMaxActivities : Below(3); i > 0; --i) {
        RankActivity& activity = answer.activities.emplace_back();
        activity.rank = Member();
        activity.text = Text();
        if (Below(2) == 0) activity.waits_for = AnyKey(Set());
      }
      return answer;
    }
    case 2:
      return PingMessage{Set()};
    case 3:
      return PongMessage{Set()};
    case 4:
      return FaultMessage{
          {Failure(), Text(), Member(), Text(), Text(), static_cast<std::int64_t>(random_())}};
    case 5:
      return ByeAckMessage{};
    case 6:
      return ByeConfirmMessage{};
    default:
      break;
  }
  if (Coin()) {
    ReportMessage report{Number(), {}};
    for (std::uint64_t i = Below(6); i > 0; --i) report.items.push_back(Item());
    return report;
  }
  StreamMessage stream{Number() | 1, {}};
  for (std::uint64_t i = Below(4); i > 0; --i) {
    Batch batch{Set(), Number() | 1, {}};
    for (std::uint64_t j = Below(5); j > 0; --j) batch.entries.push_back(AnyEntry(batch.set));
    stream.batches.push_back(batch);
  }
  return stream;
}

Message RandomMessages::Next() {
  const std::uint64_t session = Number();
  return {session, Body()};
}

namespace {

// Writes every field of every part, by hand: what the codec forgets shows up as a difference.
class Dumper {
 public:
  std::string text() const { return out_.str(); }

  void Of(const Message& message) {
    Put(message.session, message.body.index());
    std::visit([this](const auto& body) { Of(body); }, message.body);
  }

 private:
  template <typename... Values>
  void Put(const Values&... values) {
    ((out_ << values << ';'), ...);
  }
  void Text(const std::string& text) { Put(text.size(), text); }
  void Ranks(const RankRanges& ranks) {
    Put(ranks.ranges().size());
    for (const RankRange& range : ranks.ranges()) Put(range.first, range.last);
  }
  void Bits(const std::vector<bool>& bits) {
    Put(bits.size());
    for (const bool bit : bits) Put(bit);
  }
  void Of(const Key& key) {
    Put(key.set, static_cast<int>(key.form), key.number, key.bucket);
    Text(key.name.text());
  }
  void Of(const SignaturePtr& s) {
    Put(s != nullptr);
    if (s == nullptr) return;
    Put(static_cast<int>(s->kind), static_cast<int>(s->reduction), static_cast<int>(s->dtype),
        static_cast<int>(s->device), s->slot, s->root, std::bit_cast<std::uint64_t>(s->prescale),
        std::bit_cast<std::uint64_t>(s->postscale), s->layout,
        s->wire ? static_cast<int>(*s->wire) : -1, s->shape.size());
    for (const std::int64_t dimension : s->shape) Put(dimension);
    Put(s->round, s->parts.size());
    for (const SignaturePtr& part : s->parts) Of(part);
  }
  void Of(const AddSet& change) { Ranks(change.members); }
  void Of(const RemoveSet& change) { Put(change.set); }
  void Of(const Assembly&) {}
  void Of(const Refusal&) {}
  void Of(const Limits& limits) {
    Put(limits.fusion_bytes, limits.small_bytes, limits.chunk_bytes, limits.bucket_bytes,
        limits.first_bucket_bytes, limits.fusion_delay_us);
  }
  void Of(const Asked& asked) {
    Put(asked.index());
    std::visit([this](const auto& what) { Of(what); }, asked);
  }
  void Of(const ReadyItem& item) {
    Put(item.set, item.id, item.variants.size(), item.more_variants);
    Of(item.key);
    Bits(item.absent);
    Ranks(item.silent);
    for (const Variant& variant : item.variants) {
      Of(variant.asked);
      Text(variant.invalid);
      Ranks(variant.ranks);
    }
  }
  void Of(const JoinedItem& item) { Put(item.set, item.last); }
  void Of(const LeftItem& item) {
    Ranks(item.ranks);
    Text(item.why);
  }
  void Of(const StalledItem& item) {
    Of(item.key);
    Put(item.waited_us, item.limit_us, item.reported);
  }
  void Of(const ReportMessage& report) {
    Put(report.ack, report.items.size());
    for (const ReportItem& item : report.items) {
      Put(item.index());
      std::visit([this](const auto& value) { Of(value); }, item);
    }
  }
  void Of(const RunEntry& entry) {
    Put(entry.id, entry.new_id);
    Of(entry.key);
    Of(entry.signature);
    Bits(entry.absent);
    Ranks(entry.silent);
  }
  void Of(const FailEntry& entry) {
    Of(entry.key);
    Put(static_cast<int>(entry.code));
    Text(entry.text);
  }
  void Of(const EvictEntry& entry) {
    Put(entry.ids.size());
    for (const AgreedId id : entry.ids) Put(id);
  }
  void Of(const JoinDoneEntry& entry) { Put(entry.last); }
  void Of(const ByeEntry&) {}
  void Of(const AddSetEntry& entry) {
    Of(entry.key);
    Put(entry.set);
    Ranks(entry.members);
  }
  void Of(const RemoveSetEntry& entry) {
    Of(entry.key);
    Put(entry.set);
  }
  void Of(const LimitsEntry& entry) {
    Of(entry.key);
    Of(entry.limits);
  }
  void Of(const AssemblyEntry& entry) { Of(entry.key); }
  void Of(const StreamMessage& stream) {
    Put(stream.first, stream.batches.size());
    for (const Batch& batch : stream.batches) {
      Put(batch.set, batch.number, batch.entries.size());
      for (const Entry& entry : batch.entries) {
        Put(entry.index());
        std::visit([this](const auto& value) { Of(value); }, entry);
      }
    }
  }
  void Of(const QueryMessage& query) {
    Of(query.key);
    Put(query.number);
  }
  void Of(const AnswerMessage& answer) {
    Of(answer.key);
    Put(answer.number);
    Ranks(answer.missing);
    Put(answer.activities.size());
    for (const RankActivity& activity : answer.activities) {
      Put(activity.rank);
      Text(activity.text);
      Put(activity.waits_for.has_value());
      if (activity.waits_for) Of(*activity.waits_for);
    }
  }
  void Of(const PingMessage& ping) { Put(ping.set); }
  void Of(const PongMessage& pong) { Put(pong.set); }
  void Of(const FaultMessage& fault) {
    const Cause& cause = fault.cause;
    Put(static_cast<int>(cause.code), cause.rank, cause.unix_us);
    Text(cause.text);
    Text(cause.host);
    Text(cause.key);
  }
  void Of(const ByeAckMessage&) {}
  void Of(const ByeConfirmMessage&) {}

  std::ostringstream out_;
};

TEST(RandomMessagesTest, ASeedGivesTheSameMessages) {
  RandomMessages a(7);
  RandomMessages b(7);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(Dump(a.Next()), Dump(b.Next()));
}

TEST(RandomMessagesTest, EveryKindOfBodyOccurs) {
  RandomMessages messages(1);
  std::vector<int> seen(std::variant_size_v<MessageBody>);
  for (int i = 0; i < 1000; ++i) ++seen[messages.Next().body.index()];
  for (const int count : seen) EXPECT_GT(count, 0);
}

}  // namespace

std::string Dump(const Message& message) {
  Dumper dumper;
  dumper.Of(message);
  return dumper.text();
}

}  // namespace sirtaki::core
