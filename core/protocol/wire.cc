// The byte grammar of messages, which MessageFields below writes and reads. `[x]` is one byte; `x*`
// is `varint count`, then x that many times. varint, zigzag, fixed64 and text are those of
// core/base/byte_codec.h, and the word behind one of them says what its value is. What is one of
// several (`[0]`, `[1]`, ...) is a variant in core/protocol/message.h or request.h, in their order.
//
//   frame     := message fixed64 digest                     of the message: core/base/digest.h
//   message   := [0x53] [version 7] varint session body     nothing follows
//   body      := [0] report
//              | [1] stream
//              | [2] key varint number                      a query
//              | [3] answer
//              | [4] set                                    a ping
//              | [5] set                                    a pong
//              | [6] cause                                  a fault
//              | [7]                                        a bye-ack
//              | [8]                                        a bye-confirm
//
//   report    := varint ack item*
//   item      := [0] ready
//              | [1] set member                             all below have joined, `member` last
//              | [2] ranks text                             these ranks have left, and why
//              | [3] key varint waited_us varint limit_us [reported]
//                                                           somebody waits too long for this key
//   ready     := set id run-key absent ranks                ranks: the silent ones
//              | set varint 0 work-key absent ranks variant* varint more
//   variant   := [0] asked ranks                            what these ranks ask for
//              | [1] text ranks                             their request is invalid, and why
//              | [2] asked text ranks                       the same, with what it asks for
//   asked     := [0] signature
//              | [1] ranks                                  to add a set of these ranks
//              | [2] set                                    to remove a set
//              | [3] limits                                 to plan with these
//              | [4]                                        an assembly
//              | [5]                                        nothing: a refusal, with a text
//   limits    := varint fusion_bytes varint small_bytes varint chunk_bytes varint bucket_bytes
//                varint first_bucket_bytes varint fusion_delay_us
//                                                           63 bits each; chunk_bytes is not 0,
//                                                           fusion_delay_us at most 2^40
//
//   stream    := varint first batch*                        first: from 1
//   batch     := set varint number entry*                   number: from 1
//   entry     := [0] run
//              | [1] work-key [code] text                   the work fails
//              | [2] id*                                    these ids are evicted
//              | [3] member                                 the join is done; this rank was last
//              | [4]                                        bye
//              | [5] work-key set ranks                     adds a set of these ranks
//              | [6] work-key set                           removes a set
//              | [7] work-key limits                        changes the limits
//              | [8] work-key                               all members are assembled
//   id        := varint                                     not 0
//   run       := id run-key absent ranks                    ranks: the silent ones
//              | varint 0 work-key absent ranks signature varint new_id
//
//   answer    := key varint number ranks activity*          ranks: those that are missing
//   activity  := member text [0]
//              | member text [1] key                        it waits for this, and does nothing else
//   cause     := [code] text member text host text key zigzag unix_us
//
//   set       := varint                                     32 bits
//   member    := varint rank + 1                            0: none
//   key       := set work-key
//   work-key  := [1] text name                              its set stands before it, in the key,
//              | [2] varint call                            the item or the batch
//              | [3] varint arena varint bucket
//   run-key   := [0]                                        named work: the id says which
//              | [2] varint call                            unnamed work
//
//   signature := [kind] [reduction] [dtype] [device] [which] fields dimension*
//   fields    := those whose bits are set in `which`, in this order:
//                1    varint slot                           32 bits
//                2    zigzag root                           32 bits
//                4    fixed64 prescale
//                8    fixed64 postscale
//                16   fixed64 layout
//                32   [dtype]                               what the elements travel as
//                64   signature*                            parts, none of which has parts
//                128  varint round                          32 bits
//   dimension := varint                                     63 bits
//
//   absent    := varint bits byte...                        (bits + 7) / 8 bytes, the lowest bit
//                                                           first, the last padded with zeros
//   ranks     := range*                                     ascending
//   range     := varint gap varint length - 1               gap: of the first range from 0, else
//                                                           from 2 behind the end of the range
//                                                           before: ranges that touch are one
//
// So a set of ranks is sorted and disjoint by construction, and one message has one form, except
// for fields of a signature that are given though they have their default.
#include "core/protocol/wire.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <variant>

#include "core/base/digest.h"
#include "core/protocol/wire_pieces.h"

namespace sirtaki::core {
namespace {

constexpr std::uint8_t kMagic = 0x53;
constexpr std::uint8_t kVersion = 7;
constexpr auto kAnyNumber = std::numeric_limits<std::size_t>::max();

enum VariantTag : std::uint8_t { kValid, kInvalidOnly, kInvalidRequest };
enum KeyTag : std::uint8_t { kNoKey, kNamedKey, kUnnamedKey, kBucketKey };
enum SignatureField : std::uint8_t {
  kSlot = 1,
  kRoot = 2,
  kPrescale = 4,
  kPostscale = 8,
  kLayout = 16,
  kWire = 32,
  kParts = 64,
  kRound = 128,
  kAllFields = 255,
};

template <typename Choice, std::size_t I = 0>
void Emplace(Choice& choice, std::size_t index) {
  if constexpr (I + 1 < std::variant_size_v<Choice>) {
    if (index != I) return Emplace<Choice, I + 1>(choice, index);
  }
  choice.template emplace<I>();
}

bool IsDefaultFactor(double factor) {
  return std::bit_cast<std::uint64_t>(factor) == std::bit_cast<std::uint64_t>(1.0);
}

// Io: MessageWriter or MessageReader, whose message is a default one.
template <typename Io>
class MessageFields {
  template <typename T>
  using Of = typename Io::template Of<T>;

 public:
  explicit MessageFields(Io& io) : io_(io) {}

  void Visit(Of<Message>& message) {
    std::uint8_t magic = kMagic;
    io_.Byte("magic", magic, 255);
    if (magic != kMagic) io_.Fail("magic", "does not begin a message");
    std::uint8_t version = kVersion;
    io_.Byte("version", version, 255);
    if (version != kVersion) {
      io_.Fail("version",
               "is " + std::to_string(version) + ", this build speaks " + std::to_string(kVersion));
    }
    io_.Number("session", message.session);
    VisitOneOf("message kind", message.body);
  }

 private:
  template <typename Choice>
  void VisitOneOf(const char* field, Choice& choice) {
    std::size_t index = choice.index();
    io_.Byte(field, index, std::variant_size_v<Choice> - 1);
    if constexpr (Io::kReads) {
      if (index != choice.index()) Emplace(choice, index);  // it is a default one
    }
    std::visit([this](auto& value) { Visit(value); }, choice);
  }

  template <typename List>
  void VisitList(const char* field, List& list, std::size_t min_bytes,
                 std::size_t max = kAnyNumber) {
    io_.List(field, list, min_bytes, max, [this](auto& element) { Visit(element); });
  }

  void Visit(Of<ReportMessage>& report) {
    io_.Number("report ack", report.ack);
    io_.List("report items", report.items, 3, kAnyNumber,
             [this](Of<ReportItem>& item) { VisitOneOf("report item kind", item); });
  }

  void Visit(Of<ReadyItem>& item) {
    io_.Number("set", item.set);
    io_.Number("ready id", item.id);
    VisitKeyBeside(item.id, item.key, item.set);
    io_.Bits("absent bits", item.absent);
    io_.Ranks("silent ranks", item.silent);
    if (item.id != kNoId) {
      io_.Check(item.variants.empty() && item.more_variants == 0,
                "an id stands for the signature: no variants beside it");
      return;
    }
    io_.Check(item.variants.size() <= kMaxVariants, "a whole item carries 1 to 16 variants");
    VisitList("variants", item.variants, 4, kMaxVariants);
    if (item.variants.empty()) io_.Fail("variants", "are missing");
    io_.Number("further variants", item.more_variants);
  }

  void Visit(Of<JoinedItem>& item) {
    io_.Number("set", item.set);
    VisitMember("joined last", item.last);
  }

  void Visit(Of<LeftItem>& item) {
    VisitSomeRanks("left ranks", item.ranks);
    io_.Text("left why", item.why);
  }

  void Visit(Of<StalledItem>& item) {
    Visit(item.key);
    io_.Number("stalled time", item.waited_us);
    io_.Number("time of the call", item.limit_us);
    io_.Byte("whether it was reported", item.reported, 1);
  }

  void Visit(Of<Variant>& variant) {
    const bool asks = variant.asked != Asked();
    io_.Check(asks || !variant.invalid.empty(),
              "a variant asks for something or has a reason why it is invalid");
    VariantTag tag = variant.invalid.empty() ? kValid : asks ? kInvalidRequest : kInvalidOnly;
    io_.Byte("variant kind", tag, kInvalidRequest);
    if (tag != kInvalidOnly) VisitOneOf("what is asked for", variant.asked);
    if (tag != kValid) {
      io_.Text("variant reason", variant.invalid);
      if (variant.invalid.empty()) io_.Fail("variant reason", "is empty");
    } else if (std::holds_alternative<Refusal>(variant.asked)) {
      io_.Fail("variant reason", "is missing: a refusal has one");
    }
    VisitSomeRanks("variant ranks", variant.ranks);
  }

  void Visit(Of<AddSet>& change) { io_.Ranks("members", change.members); }
  void Visit(Of<RemoveSet>& change) { io_.Number("set", change.set); }
  void Visit(Of<Assembly>&) {}
  void Visit(Of<Refusal>&) {}

  void Visit(Of<Limits>& limits) {
    io_.Check(limits.AreAllowed(), "limits are checked at submission");
    Limits::ForEach(limits, [this](const char* name, auto& value) { io_.Number(name, value); });
    if (!limits.AreAllowed()) io_.Fail("limits", "are not allowed");
  }

  void Visit(Of<StreamMessage>& stream) {
    io_.Number("stream first", stream.first);
    if (stream.first == 0) io_.Fail("stream first", "is 0, batches count from 1");
    VisitList("batches", stream.batches, 3);
  }

  void Visit(Of<Batch>& batch) {
    io_.Number("set", batch.set);
    io_.Number("batch number", batch.number);
    if (batch.number == 0) io_.Fail("batch number", "is 0, batches count from 1");
    set_ = batch.set;
    io_.List("entries", batch.entries, 1, kAnyNumber,
             [this](Of<Entry>& entry) { VisitOneOf("entry kind", entry); });
  }

  void Visit(Of<RunEntry>& entry) {
    io_.Number("run id", entry.id);
    VisitKeyBeside(entry.id, entry.key, set_);
    io_.Bits("absent bits", entry.absent);
    io_.Ranks("silent ranks", entry.silent);
    io_.Check((entry.signature == nullptr) == (entry.id != kNoId),
              "an entry runs by a known id or by its signature");
    if (entry.id != kNoId) {
      io_.Check(entry.new_id == kNoId, "what has an id gets no other");
      return;
    }
    Visit(entry.signature);
    io_.Number("run new id", entry.new_id);
  }

  void Visit(Of<FailEntry>& entry) {
    VisitWorkKey(entry.key);
    VisitCode(entry.code);
    io_.Text("fail text", entry.text);
  }

  void Visit(Of<EvictEntry>& entry) {
    io_.List("evicted ids", entry.ids, 1, kAnyNumber, [this](Of<AgreedId>& id) {
      io_.Number("evicted id", id);
      if (id == kNoId) io_.Fail("evicted id", "is 0");
    });
  }

  void Visit(Of<JoinDoneEntry>& entry) { VisitMember("join last", entry.last); }
  void Visit(Of<ByeEntry>&) {}

  void Visit(Of<AddSetEntry>& entry) {
    VisitWorkKey(entry.key);
    io_.Number("set", entry.set);
    VisitSomeRanks("members of the set", entry.members);
  }

  void Visit(Of<RemoveSetEntry>& entry) {
    VisitWorkKey(entry.key);
    io_.Number("set", entry.set);
  }

  void Visit(Of<LimitsEntry>& entry) {
    VisitWorkKey(entry.key);
    Visit(entry.limits);
  }

  void Visit(Of<AssemblyEntry>& entry) { VisitWorkKey(entry.key); }

  void Visit(Of<QueryMessage>& query) {
    Visit(query.key);
    io_.Number("query number", query.number);
  }

  void Visit(Of<AnswerMessage>& answer) {
    Visit(answer.key);
    io_.Number("answer number", answer.number);
    io_.Ranks("missing ranks", answer.missing);
    // Examples for a warning: losing some is better than failing.
    VisitList("activities", answer.activities, 3, kMaxActivities);
  }

  void Visit(Of<RankActivity>& activity) {
    VisitMember("activity rank", activity.rank);
    io_.Text("activity text", activity.text);
    bool waits = activity.waits_for.has_value();
    io_.Byte("whether it waits", waits, 1);
    if (waits) Visit(ValueOf(activity.waits_for));
  }

  void Visit(Of<PingMessage>& ping) { io_.Number("set", ping.set); }
  void Visit(Of<PongMessage>& pong) { io_.Number("set", pong.set); }

  void Visit(Of<FaultMessage>& fault) {
    VisitCode(fault.cause.code);
    io_.Text("cause text", fault.cause.text);
    VisitMember("cause rank", fault.cause.rank);
    io_.Text("cause host", fault.cause.host);
    io_.Text("cause key", fault.cause.key);
    io_.Signed("cause time", fault.cause.unix_us);
  }

  void Visit(Of<ByeAckMessage>&) {}
  void Visit(Of<ByeConfirmMessage>&) {}

  void Visit(Of<SignaturePtr>& signature) {
    if constexpr (Io::kReads) {
      auto read = std::make_shared<Signature>();
      VisitSignature(*read);
      signature = std::move(read);
    } else {
      VisitSignature(*signature);
    }
  }

  void VisitSignature(Of<Signature>& s) {
    io_.Byte("kind", s.kind, kOpKindCount - 1);
    io_.Byte("reduction", s.reduction, kReduceOpCount - 1);
    io_.Byte("dtype", s.dtype, kDTypeCount - 1);
    io_.Byte("device", s.device, kDeviceKindCount - 1);
    int which = (s.slot != 0 ? kSlot : 0) | (s.root != -1 ? kRoot : 0) |
                (!IsDefaultFactor(s.prescale) ? kPrescale : 0) |
                (!IsDefaultFactor(s.postscale) ? kPostscale : 0) | (s.layout != 0 ? kLayout : 0) |
                (s.wire ? kWire : 0) | (!s.parts.empty() ? kParts : 0) |
                (s.round != 0 ? kRound : 0);
    io_.Byte("signature fields", which, kAllFields);
    if ((which & kSlot) != 0) io_.Number("device slot", s.slot);
    if ((which & kRoot) != 0) io_.Signed("root", s.root);
    if ((which & kPrescale) != 0) io_.Fixed("prescale", s.prescale);
    if ((which & kPostscale) != 0) io_.Fixed("postscale", s.postscale);
    if ((which & kLayout) != 0) io_.Fixed("bucket layout", s.layout);
    if ((which & kWire) != 0) io_.Byte("wire type", ValueOf(s.wire), kDTypeCount - 1);
    if ((which & kParts) != 0) VisitParts(s.parts);
    if ((which & kRound) != 0) io_.Number("round", s.round);
    io_.Check(s.shape.size() <= kMaxDimensions, "dimensions are checked at submission");
    io_.List("dimensions", s.shape, 1, kMaxDimensions, [this](Of<std::int64_t>& dimension) {
      io_.Check(dimension >= 0, "a dimension is not negative");
      io_.Number("dimension", dimension);
    });
  }

  void VisitParts(Of<std::vector<SignaturePtr>>& parts) {
    io_.Check(parts.size() <= kMaxParts, "the number of tensors is checked at submission");
    const bool is_part = std::exchange(in_parts_, true);
    io_.List("parts", parts, 6, kMaxParts, [this, is_part](Of<SignaturePtr>& part) {
      if (is_part) io_.Fail("parts", "are parts of a part");
      Visit(part);
    });
    in_parts_ = is_part;
    if (parts.empty()) io_.Fail("parts", "are missing");
  }

  void VisitSomeRanks(const char* field, Of<RankRanges>& ranks) {
    io_.Ranks(field, ranks);
    if (ranks.empty()) io_.Fail(field, "are missing");
  }

  void Visit(Of<Key>& key) {
    io_.Number("set", key.set);
    VisitKeyBeside(kNoId, key, key.set);
  }

  void VisitWorkKey(Of<Key>& key) { VisitKeyBeside(kNoId, key, set_); }

  // The key beside an id: what has a name is named by the id, unnamed work has a number of its own.
  void VisitKeyBeside(AgreedId id, Of<Key>& key, SetNumber set) {
    const bool has_none = key.form == Key::Form::kNamed && key.name.empty();
    int tag = has_none ? int{kNoKey} : int{kNamedKey} + static_cast<int>(key.form);
    io_.Byte("key form", tag, id == kNoId ? kBucketKey : kUnnamedKey);
    // A name does not stand beside an id: it would contradict the id or repeat it.
    if (tag == (id == kNoId ? kNoKey : kNamedKey)) {
      io_.Fail("key form", "is " + std::to_string(tag) + ", which is not allowed here");
    }
    if (!io_.ok() || tag == kNoKey) return;
    io_.Check(key.set == set, "a key is of the set of its item or batch");
    if constexpr (Io::kReads) {
      key.set = set;
      key.form = static_cast<Key::Form>(tag - kNamedKey);
    }
    if (tag == kNamedKey) {
      io_.Text("name", key.name);
      if (key.name.empty()) io_.Fail("name", "is empty");
    } else {
      io_.Number(tag == kUnnamedKey ? "call number" : "arena", key.number);
      if (tag == kBucketKey) io_.Number("bucket", key.bucket);
    }
  }

  void VisitMember(const char* field, Of<int>& rank) {
    io_.Check(rank >= -1, "a rank, or -1 for none");
    std::int64_t number = std::int64_t{rank} + 1;
    io_.Number(field, number, kMaxRank + 1);
    if constexpr (Io::kReads) rank = static_cast<int>(number - 1);
  }

  void VisitCode(Of<StatusCode>& code) {
    io_.Byte("status code", code, static_cast<int>(kLastStatusCode));
    if (code == StatusCode::kOk) io_.Fail("status code", "says that nothing failed");
  }

  template <typename Optional>
  static auto& ValueOf(Optional& optional) {
    if constexpr (Io::kReads) optional.emplace();
    return *optional;
  }

  Io& io_;
  SetNumber set_ = kWorldSet;  // of the batch that is visited
  bool in_parts_ = false;      // of a signature
};

MessageWriter Written(const Message& message) {
  MessageWriter writer;
  MessageFields(writer).Visit(message);
  return writer;
}

}  // namespace

Bytes Encode(const Message& message) { return Written(message).Take(); }

Bytes EncodeFrame(const Message& message) {
  MessageWriter writer = Written(message);
  writer.Digest();
  return writer.Take();
}

Status Decode(std::span<const std::byte> bytes, Message* message) {
  try {
    MessageReader reader(bytes);
    MessageFields(reader).Visit(*message);
    return reader.End();
  } catch (const std::bad_alloc&) {
    return {StatusCode::kProtocol,
            "no memory to read a message of " + std::to_string(bytes.size()) + " bytes"};
  }
}

Status DecodeFrame(std::span<const std::byte> frame, Message* message) {
  // Another version may end its frames otherwise, and is named.
  if (frame.size() > 1 && frame[1] != std::byte{kVersion}) return Decode(frame, message);
  const std::size_t bytes = frame.size() - std::min(frame.size(), sizeof(std::uint64_t));
  ByteReader behind(frame.subspan(bytes));
  const std::uint64_t digest = behind.Fixed64("digest");
  if (!behind.ok()) return behind.status();
  if (digest != Digest(frame.data(), bytes)) {
    return {StatusCode::kProtocol,
            "its " + std::to_string(bytes) + " bytes arrived changed: they have another digest"};
  }
  return Decode(frame.first(bytes), message);
}

}  // namespace sirtaki::core
