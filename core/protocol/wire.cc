// The byte grammar of messages. MessageWriter below writes it, wire_decode.cc reads it. `[x]` is
// one byte; `x*` is `varint count`, then x that many times. varint, zigzag, fixed64 and text are
// those of core/base/byte_codec.h, and the word behind one of them says what its value is.
//
//   frame     := message fixed64 digest                     of the message: core/base/digest.h
//   message   := [0x53] [version 5] varint session body     nothing follows
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
//              | [3] key varint waited_us varint limit_us   somebody waits too long for this key
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
#include <string>
#include <string_view>
#include <utility>

#include "core/base/byte_codec.h"
#include "core/base/check.h"
#include "core/base/digest.h"
#include "core/protocol/wire_format.h"

namespace sirtaki::core {
namespace {

using namespace wire_format;  // NOLINT: its names were made for this file

class MessageWriter {
 public:
  std::vector<std::byte> Take() { return out_.Take(); }

  void Put(const Message& message) {
    out_.Byte(kMagic);
    out_.Byte(kVersion);
    out_.Varint(message.session);
    static_assert(std::variant_size_v<MessageBody> == kByeConfirm + 1);
    out_.Byte(static_cast<std::uint8_t>(message.body.index()));
    std::visit([this](const auto& body) { Put(body); }, message.body);
  }

  void PutDigest() { out_.Fixed64(Digest(out_.bytes().data(), out_.bytes().size())); }

 private:
  void Put(const ReportMessage& report) {
    static_assert(std::variant_size_v<ReportItem> == kStalled + 1);
    out_.Varint(report.ack);
    out_.Varint(report.items.size());
    for (const ReportItem& item : report.items) {
      out_.Byte(static_cast<std::uint8_t>(item.index()));
      std::visit([this](const auto& value) { Put(value); }, item);
    }
  }

  void Put(const ReadyItem& item) {
    out_.Varint(item.set);
    out_.Varint(item.id);
    PutRunKey(item.key, item.set, item.id);
    PutAbsent(item.absent);
    Put(item.silent);
    if (item.id != kNoId) {
      SIRTAKI_CHECK(item.variants.empty() && item.more_variants == 0,
                    "an id stands for the signature: no variants beside it");
      return;
    }
    SIRTAKI_CHECK(!item.variants.empty() && item.variants.size() <= kMaxVariants,
                  "a whole item carries 1 to 16 variants");
    out_.Varint(item.variants.size());
    for (const Variant& variant : item.variants) Put(variant);
    out_.Varint(item.more_variants);
  }

  void Put(const JoinedItem& item) {
    out_.Varint(item.set);
    PutMember(item.last);
  }

  void Put(const LeftItem& item) {
    Put(item.ranks);
    PutText(item.why);
  }

  void Put(const StalledItem& item) {
    PutKey(item.key);
    out_.Varint(item.waited_us < 0 ? 0 : static_cast<std::uint64_t>(item.waited_us));
    out_.Varint(item.limit_us < 0 ? 0 : static_cast<std::uint64_t>(item.limit_us));
  }

  void Put(const Variant& variant) {
    const bool asks = variant.asked != Asked();
    SIRTAKI_CHECK(asks || !variant.invalid.empty(),
                  "a variant asks for something or has a reason why it is invalid");
    if (variant.invalid.empty()) {
      out_.Byte(kValid);
    } else {
      out_.Byte(asks ? kInvalidRequest : kInvalidOnly);
    }
    if (asks) {
      static_assert(std::variant_size_v<Asked> == kAskAssembly + 1);
      out_.Byte(static_cast<std::uint8_t>(variant.asked.index()));
      std::visit([this](const auto& asked) { Put(asked); }, variant.asked);
    }
    if (!variant.invalid.empty()) PutText(variant.invalid);
    Put(variant.ranks);
  }

  void Put(const SignaturePtr& signature) { Put(*signature); }
  void Put(const AddSet& change) { Put(change.members); }
  void Put(const RemoveSet& change) { out_.Varint(change.set); }
  void Put(const Assembly&) {}

  void Put(const Limits& limits) {
    SIRTAKI_CHECK(limits.AreAllowed(), "limits are checked at submission");
    Limits::ForEach(limits, [this](const char*, std::int64_t value) {
      out_.Varint(static_cast<std::uint64_t>(value));
    });
  }

  void Put(const StreamMessage& stream) {
    out_.Varint(stream.first);
    out_.Varint(stream.batches.size());
    static_assert(std::variant_size_v<Entry> == kAssemblyTag + 1);
    for (const Batch& batch : stream.batches) {
      set_ = batch.set;
      out_.Varint(batch.set);
      out_.Varint(batch.number);
      out_.Varint(batch.entries.size());
      for (const Entry& entry : batch.entries) {
        out_.Byte(static_cast<std::uint8_t>(entry.index()));
        std::visit([this](const auto& value) { Put(value); }, entry);
      }
    }
  }

  void Put(const RunEntry& entry) {
    out_.Varint(entry.id);
    PutRunKey(entry.key, set_, entry.id);
    PutAbsent(entry.absent);
    Put(entry.silent);
    SIRTAKI_CHECK((entry.signature == nullptr) == (entry.id != kNoId),
                  "an entry runs by a known id or by its signature");
    if (entry.id != kNoId) {
      SIRTAKI_CHECK(entry.new_id == kNoId, "what has an id gets no other");
      return;
    }
    Put(*entry.signature);
    out_.Varint(entry.new_id);
  }

  void Put(const FailEntry& entry) {
    PutWorkKey(entry.key, set_);
    PutCode(entry.code);
    PutText(entry.text);
  }

  void Put(const EvictEntry& entry) {
    out_.Varint(entry.ids.size());
    for (AgreedId id : entry.ids) out_.Varint(id);
  }

  void Put(const JoinDoneEntry& entry) { PutMember(entry.last); }
  void Put(const ByeEntry&) {}

  void Put(const AddSetEntry& entry) {
    PutWorkKey(entry.key, set_);
    out_.Varint(entry.set);
    Put(entry.members);
  }

  void Put(const RemoveSetEntry& entry) {
    PutWorkKey(entry.key, set_);
    out_.Varint(entry.set);
  }

  void Put(const LimitsEntry& entry) {
    PutWorkKey(entry.key, set_);
    Put(entry.limits);
  }

  void Put(const AssemblyEntry& entry) { PutWorkKey(entry.key, set_); }

  void Put(const QueryMessage& query) {
    PutKey(query.key);
    out_.Varint(query.number);
  }

  void Put(const AnswerMessage& answer) {
    PutKey(answer.key);
    out_.Varint(answer.number);
    Put(answer.missing);
    // Examples for a warning: losing some is better than failing.
    const std::size_t count = std::min(answer.activities.size(), kMaxActivities);
    out_.Varint(count);
    for (std::size_t i = 0; i < count; ++i) {
      PutMember(answer.activities[i].rank);
      PutText(answer.activities[i].text);
      const std::optional<Key>& waits_for = answer.activities[i].waits_for;
      out_.Byte(waits_for ? 1 : 0);
      if (waits_for) PutKey(*waits_for);
    }
  }

  void Put(const PingMessage& ping) { out_.Varint(ping.set); }
  void Put(const PongMessage& pong) { out_.Varint(pong.set); }

  void Put(const FaultMessage& fault) {
    PutCode(fault.cause.code);
    PutText(fault.cause.text);
    PutMember(fault.cause.rank);
    PutText(fault.cause.host);
    PutText(fault.cause.key);
    out_.Zigzag(fault.cause.unix_us);
  }

  void Put(const ByeAckMessage&) {}
  void Put(const ByeConfirmMessage&) {}

  void Put(const Signature& s) {
    out_.Byte(static_cast<std::uint8_t>(s.kind));
    out_.Byte(static_cast<std::uint8_t>(s.reduction));
    out_.Byte(static_cast<std::uint8_t>(s.dtype));
    out_.Byte(static_cast<std::uint8_t>(s.device));
    const auto prescale = std::bit_cast<std::uint64_t>(s.prescale);
    const auto postscale = std::bit_cast<std::uint64_t>(s.postscale);
    const int which = (s.slot != 0 ? kSlot : 0) | (s.root != -1 ? kRoot : 0) |
                      (prescale != kDefaultFactor ? kPrescale : 0) |
                      (postscale != kDefaultFactor ? kPostscale : 0) |
                      (s.layout != 0 ? kLayout : 0) | (s.wire ? kWire : 0) |
                      (!s.parts.empty() ? kParts : 0) | (s.round != 0 ? kRound : 0);
    out_.Byte(static_cast<std::uint8_t>(which));
    if ((which & kSlot) != 0) out_.Varint(s.slot);
    if ((which & kRoot) != 0) out_.Zigzag(s.root);
    if ((which & kPrescale) != 0) out_.Fixed64(prescale);
    if ((which & kPostscale) != 0) out_.Fixed64(postscale);
    if ((which & kLayout) != 0) out_.Fixed64(s.layout);
    if ((which & kWire) != 0) out_.Byte(static_cast<std::uint8_t>(*s.wire));
    if ((which & kParts) != 0) {
      SIRTAKI_CHECK(s.parts.size() <= kMaxParts, "the number of tensors is checked at submission");
      out_.Varint(s.parts.size());
      for (const SignaturePtr& part : s.parts) {
        SIRTAKI_CHECK(part->parts.empty(), "a part has no parts");
        Put(*part);
      }
    }
    if ((which & kRound) != 0) out_.Varint(s.round);
    SIRTAKI_CHECK(s.shape.size() <= kMaxDimensions, "dimensions are checked at submission");
    out_.Varint(s.shape.size());
    for (std::int64_t dimension : s.shape) {
      SIRTAKI_CHECK(dimension >= 0, "a dimension is not negative");
      out_.Varint(static_cast<std::uint64_t>(dimension));
    }
  }

  void Put(const RankRanges& ranks) {
    out_.Varint(ranks.ranges().size());
    std::int64_t next = 0;  // the lowest rank that the next range can begin with
    for (const RankRange& range : ranks.ranges()) {
      SIRTAKI_CHECK(range.first >= next, "ranks are not negative");
      out_.Varint(static_cast<std::uint64_t>(range.first - next));
      out_.Varint(static_cast<std::uint64_t>(std::int64_t{range.last} - range.first));
      next = std::int64_t{range.last} + 2;
    }
  }

  void PutKey(const Key& key) {
    out_.Varint(key.set);
    PutWorkKey(key, key.set);
  }

  // The key beside an id: what has a name is named by the id, unnamed work has a number of its own.
  void PutRunKey(const Key& key, SetNumber set, AgreedId id) {
    if (id != kNoId && key.form == Key::Form::kNamed && key.name.empty()) {
      out_.Byte(kNoKey);
      return;
    }
    SIRTAKI_CHECK(id == kNoId || key.form == Key::Form::kUnnamed,
                  "beside an id only the number of an unnamed call is sent");
    PutWorkKey(key, set);
  }

  void PutWorkKey(const Key& key, SetNumber set) {
    SIRTAKI_CHECK(key.set == set, "a key is of the set of its item or batch");
    switch (key.form) {
      case Key::Form::kNamed:
        SIRTAKI_CHECK(!key.name.empty() && key.name.text().size() <= kMaxNameBytes,
                      "names are checked at submission");
        out_.Byte(kNamedKey);
        out_.Text(key.name.text());
        break;
      case Key::Form::kUnnamed:
        out_.Byte(kUnnamedKey);
        out_.Varint(key.number);
        break;
      case Key::Form::kBucket:
        out_.Byte(kBucketKey);
        out_.Varint(key.number);
        out_.Varint(key.bucket);
        break;
    }
  }

  void PutAbsent(const std::vector<bool>& absent) {
    out_.Varint(absent.size());
    std::uint8_t byte = 0;
    for (std::size_t i = 0; i < absent.size(); ++i) {
      if (absent[i]) byte = static_cast<std::uint8_t>(byte | (1U << (i % 8)));
      if (i % 8 == 7 || i + 1 == absent.size()) {
        out_.Byte(byte);
        byte = 0;
      }
    }
  }

  void PutMember(int rank) {
    SIRTAKI_CHECK(rank >= -1, "a rank, or -1 for none");
    out_.Varint(static_cast<std::uint64_t>(std::int64_t{rank} + 1));
  }

  void PutCode(StatusCode code) {
    SIRTAKI_CHECK(code != StatusCode::kOk, "a failure has a code");
    out_.Byte(static_cast<std::uint8_t>(code));
  }

  void PutText(std::string_view text) {
    if (text.size() <= kMaxTextBytes) {
      out_.Text(text);
      return;
    }
    constexpr std::string_view kCut = "...";
    std::size_t end = kMaxTextBytes - kCut.size();
    // Not in the middle of a UTF-8 character: its later bytes begin with the bits 10.
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0U) == 0x80U) --end;
    out_.Text(std::string(text.substr(0, end)).append(kCut));
  }

  ByteWriter out_;
  SetNumber set_ = kWorldSet;  // of the batch that is being written
};

}  // namespace

Bytes Encode(const Message& message) {
  MessageWriter writer;
  writer.Put(message);
  return writer.Take();
}

Bytes EncodeFrame(const Message& message) {
  MessageWriter writer;
  writer.Put(message);
  writer.PutDigest();
  return writer.Take();
}

}  // namespace sirtaki::core
