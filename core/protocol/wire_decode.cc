// The grammar is at the top of wire.cc.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "core/base/byte_codec.h"
#include "core/base/digest.h"
#include "core/protocol/wire.h"
#include "core/protocol/wire_format.h"

namespace sirtaki::core {
namespace {

using namespace wire_format;  // NOLINT: its names were made for this file

class MessageReader {
 public:
  explicit MessageReader(std::span<const std::byte> bytes) : in_(bytes) {}

  Status Get(Message* message) {
    if (in_.Byte("magic") != kMagic) in_.Fail("magic", "does not begin a message");
    const std::uint8_t version = in_.Byte("version");
    if (version != kVersion) {
      in_.Fail("version",
               "is " + std::to_string(version) + ", this build speaks " + std::to_string(kVersion));
    }
    message->session = in_.Varint("session");
    message->body = GetBody(in_.ByteUpTo("message kind", kByeConfirm));
    in_.ExpectEnd();
    return in_.status();
  }

 private:
  MessageBody GetBody(std::uint8_t tag) {
    switch (tag) {
      case kReport:
        return GetReport();
      case kStream:
        return GetStream();
      case kQuery:
        return GetQuery();
      case kAnswer:
        return GetAnswer();
      case kPing:
        return PingMessage{GetSet()};
      case kPong:
        return PongMessage{GetSet()};
      case kFault:
        return FaultMessage{GetCause()};
      case kByeAck:
        return ByeAckMessage{};
      default:
        return ByeConfirmMessage{};
    }
  }

  // Lists grow as their elements are really there: a count alone allocates nothing.

  ReportMessage GetReport() {
    ReportMessage report;
    report.ack = in_.Varint("report ack");
    const std::size_t count = in_.Count("report items", 3);
    for (std::size_t i = 0; i < count && in_.ok(); ++i) GetItem(&report.items.emplace_back());
    return report;
  }

  // What is most frequent is read where it is to be: here, and of entries.
  void GetItem(ReportItem* to) {
    switch (in_.ByteUpTo("report item kind", kStalled)) {
      case kReady:
        return GetReady(&to->emplace<ReadyItem>());
      case kJoined: {
        const SetNumber set = GetSet();
        *to = JoinedItem{set, GetMember("joined last")};
        return;
      }
      case kLeft: {
        auto& item = to->emplace<LeftItem>();
        item.ranks = GetSomeRanks("left ranks");
        item.why = in_.Text("left why", kMaxTextBytes);
        return;
      }
      default: {
        auto& item = to->emplace<StalledItem>();
        item.key = GetKey();
        item.waited_us = static_cast<std::int64_t>(
            in_.Varint("stalled time", std::numeric_limits<std::int64_t>::max()));
        item.limit_us = static_cast<std::int64_t>(
            in_.Varint("time of the call", std::numeric_limits<std::int64_t>::max()));
      }
    }
  }

  void GetReady(ReadyItem* to) {
    ReadyItem& item = *to;
    item.set = GetSet();
    item.id = in_.Varint("ready id");
    item.key = GetRunKey(item.set, item.id);
    item.absent = GetAbsent();
    item.silent = GetRanks("silent ranks");
    if (item.id != kNoId) return;
    const std::size_t count = in_.Count("variants", 4, kMaxVariants);
    if (count == 0) in_.Fail("variants", "are missing");
    for (std::size_t i = 0; i < count && in_.ok(); ++i) item.variants.push_back(GetVariant());
    item.more_variants = static_cast<std::uint32_t>(
        in_.Varint("further variants", std::numeric_limits<std::uint32_t>::max()));
  }

  Variant GetVariant() {
    Variant variant;
    const std::uint8_t tag = in_.ByteUpTo("variant kind", kInvalidRequest);
    if (tag != kInvalidOnly) variant.asked = GetAsked();
    if (tag != kValid) {
      variant.invalid = in_.Text("variant reason", kMaxTextBytes);
      if (variant.invalid.empty()) in_.Fail("variant reason", "is empty");
    }
    variant.ranks = GetSomeRanks("variant ranks");
    return variant;
  }

  Asked GetAsked() {
    switch (in_.ByteUpTo("what is asked for", kAskAssembly)) {
      case kAskCollective:
        return GetSignature();
      case kAskAddSet:
        return AddSet{GetRanks("members")};
      case kAskRemoveSet:
        return RemoveSet{GetSet()};
      case kAskLimits:
        return GetLimits();
      default:
        return Assembly{};
    }
  }

  Limits GetLimits() {
    Limits limits;
    Limits::ForEach(limits, [this](const char* name, std::int64_t& value) {
      value = static_cast<std::int64_t>(in_.Varint(name, std::numeric_limits<std::int64_t>::max()));
    });
    if (!limits.AreAllowed()) in_.Fail("limits", "are not allowed");
    return limits;
  }

  StreamMessage GetStream() {
    StreamMessage stream;
    stream.first = in_.Varint("stream first");
    if (stream.first == 0) in_.Fail("stream first", "is 0, batches count from 1");
    const std::size_t count = in_.Count("batches", 3);
    for (std::size_t i = 0; i < count && in_.ok(); ++i) stream.batches.push_back(GetBatch());
    return stream;
  }

  Batch GetBatch() {
    Batch batch;
    batch.set = GetSet();
    batch.number = in_.Varint("batch number");
    if (batch.number == 0) in_.Fail("batch number", "is 0, batches count from 1");
    const std::size_t count = in_.Count("entries", 1);
    for (std::size_t i = 0; i < count && in_.ok(); ++i) {
      GetEntry(batch.set, &batch.entries.emplace_back());
    }
    return batch;
  }

  void GetEntry(SetNumber set, Entry* to) {
    switch (in_.ByteUpTo("entry kind", kAssemblyTag)) {
      case kRun:
        return GetRun(set, &to->emplace<RunEntry>());
      case kFail: {
        auto& entry = to->emplace<FailEntry>();
        entry.key = GetWorkKey(set);
        entry.code = GetCode();
        entry.text = in_.Text("fail text", kMaxTextBytes);
        return;
      }
      case kEvict: {
        auto& entry = to->emplace<EvictEntry>();
        const std::size_t count = in_.Count("evicted ids", 1);
        for (std::size_t i = 0; i < count && in_.ok(); ++i) {
          entry.ids.push_back(in_.Varint("evicted id"));
          if (entry.ids.back() == kNoId) in_.Fail("evicted id", "is 0");
        }
        return;
      }
      case kJoinDone:
        *to = JoinDoneEntry{GetMember("join last")};
        return;
      case kBye:
        *to = ByeEntry{};
        return;
      case kAddSetTag: {
        auto& entry = to->emplace<AddSetEntry>();
        entry.key = GetWorkKey(set);
        entry.set = GetSet();
        entry.members = GetSomeRanks("members of the set");
        return;
      }
      case kRemoveSetTag: {
        auto& entry = to->emplace<RemoveSetEntry>();
        entry.key = GetWorkKey(set);
        entry.set = GetSet();
        return;
      }
      case kLimitsTag: {
        auto& entry = to->emplace<LimitsEntry>();
        entry.key = GetWorkKey(set);
        entry.limits = GetLimits();
        return;
      }
      default:
        *to = AssemblyEntry{GetWorkKey(set)};
    }
  }

  void GetRun(SetNumber set, RunEntry* to) {
    RunEntry& entry = *to;
    entry.id = in_.Varint("run id");
    entry.key = GetRunKey(set, entry.id);
    entry.absent = GetAbsent();
    entry.silent = GetRanks("silent ranks");
    if (entry.id != kNoId) return;
    entry.signature = GetSignature();
    entry.new_id = in_.Varint("run new id");
  }

  QueryMessage GetQuery() {
    QueryMessage query;
    query.key = GetKey();
    query.number = in_.Varint("query number");
    return query;
  }

  AnswerMessage GetAnswer() {
    AnswerMessage answer;
    answer.key = GetKey();
    answer.number = in_.Varint("answer number");
    answer.missing = GetRanks("missing ranks");
    const std::size_t count = in_.Count("activities", 3, kMaxActivities);
    for (std::size_t i = 0; i < count && in_.ok(); ++i) {
      RankActivity& activity = answer.activities.emplace_back();
      activity.rank = GetMember("activity rank");
      activity.text = in_.Text("activity text", kMaxTextBytes);
      if (in_.ByteUpTo("whether it waits", 1) == 1) activity.waits_for = GetKey();
    }
    return answer;
  }

  Cause GetCause() {
    Cause cause;
    cause.code = GetCode();
    cause.text = in_.Text("cause text", kMaxTextBytes);
    cause.rank = GetMember("cause rank");
    cause.host = in_.Text("cause host", kMaxTextBytes);
    cause.key = in_.Text("cause key", kMaxTextBytes);
    cause.unix_us = in_.Zigzag("cause time");
    return cause;
  }

  SignaturePtr GetSignature(bool is_part = false) {
    auto s = std::make_shared<Signature>();
    s->kind = static_cast<OpKind>(in_.ByteUpTo("kind", kOpKindCount - 1));
    s->reduction = static_cast<ReduceOp>(in_.ByteUpTo("reduction", kReduceOpCount - 1));
    s->dtype = static_cast<DType>(in_.ByteUpTo("dtype", kDTypeCount - 1));
    s->device = static_cast<DeviceKind>(in_.ByteUpTo("device", kDeviceKindCount - 1));
    const std::uint8_t which = in_.ByteUpTo("signature fields", kAllFields);
    if ((which & kSlot) != 0) {
      s->slot = static_cast<std::uint32_t>(
          in_.Varint("device slot", std::numeric_limits<std::uint32_t>::max()));
    }
    if ((which & kRoot) != 0) s->root = GetRoot();
    if ((which & kPrescale) != 0) s->prescale = std::bit_cast<double>(in_.Fixed64("prescale"));
    if ((which & kPostscale) != 0) s->postscale = std::bit_cast<double>(in_.Fixed64("postscale"));
    if ((which & kLayout) != 0) s->layout = in_.Fixed64("bucket layout");
    if ((which & kWire) != 0) {
      s->wire = static_cast<DType>(in_.ByteUpTo("wire type", kDTypeCount - 1));
    }
    if ((which & kParts) != 0) {
      const std::size_t parts = in_.Count("parts", 6, kMaxParts);
      if (is_part || parts == 0) in_.Fail("parts", is_part ? "are parts of a part" : "are missing");
      for (std::size_t i = 0; i < parts && in_.ok(); ++i) {
        s->parts.push_back(GetSignature(/*is_part=*/true));
      }
    }
    if ((which & kRound) != 0) {
      s->round = static_cast<std::uint32_t>(
          in_.Varint("round", std::numeric_limits<std::uint32_t>::max()));
    }
    const std::size_t count = in_.Count("dimensions", 1, kMaxDimensions);
    s->shape.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      s->shape.push_back(static_cast<std::int64_t>(
          in_.Varint("dimension", std::numeric_limits<std::int64_t>::max())));
    }
    return s;
  }

  std::int32_t GetRoot() {
    const std::int64_t root = in_.Zigzag("root");
    if (root >= std::numeric_limits<std::int32_t>::min() &&
        root <= std::numeric_limits<std::int32_t>::max()) {
      return static_cast<std::int32_t>(root);
    }
    in_.Fail("root", "does not fit into 32 bits");
    return -1;
  }

  RankRanges GetRanks(const char* field) {
    RankRanges ranks;
    const std::size_t count = in_.Count(field, 2);
    std::uint64_t next = 0;
    for (std::size_t i = 0; i < count && in_.ok(); ++i) {
      // Both below 2^31, so that no sum wraps.
      const std::uint64_t first = next + in_.Varint(field, kMaxRank);
      const std::uint64_t last = first + in_.Varint(field, kMaxRank);
      if (last > kMaxRank) {
        in_.Fail(field, "go up to " + std::to_string(last));
        break;
      }
      ranks.Add(RankRanges::Span(static_cast<int>(first), static_cast<int>(last)));
      next = last + 2;
    }
    return ranks;
  }

  RankRanges GetSomeRanks(const char* field) {
    RankRanges ranks = GetRanks(field);
    if (ranks.empty()) in_.Fail(field, "are missing");
    return ranks;
  }

  Key GetKey() { return GetWorkKey(GetSet()); }

  Key GetWorkKey(SetNumber set) { return GetKeyFrom(kNamedKey, kBucketKey, set); }

  Key GetRunKey(SetNumber set, AgreedId id) {
    if (id == kNoId) return GetWorkKey(set);
    return GetKeyFrom(kNoKey, kUnnamedKey, set);
  }

  Key GetKeyFrom(std::uint8_t lowest, std::uint8_t highest, SetNumber set) {
    const std::uint8_t tag = in_.ByteUpTo("key form", highest);
    // Beside an id there is no name: it would contradict the id or repeat it.
    const bool allowed = tag >= lowest && (lowest != kNoKey || tag != kNamedKey);
    if (!allowed) in_.Fail("key form", "is " + std::to_string(tag) + ", which is not allowed here");
    if (!in_.ok() || tag == kNoKey) return {};
    if (tag == kUnnamedKey) return Key::Unnamed(set, in_.Varint("call number"));
    if (tag == kBucketKey) {
      const std::uint64_t arena = in_.Varint("arena");
      return Key::Bucket(set, arena, in_.Varint("bucket"));
    }
    Key key = Key::Named(set, in_.Text("name", kMaxNameBytes));
    if (key.name.empty()) in_.Fail("name", "is empty");
    return key;
  }

  std::vector<bool> GetAbsent() {
    // Eight bits a byte, so the count is held against the bytes by hand.
    const std::uint64_t bits = in_.Varint("absent bits");
    if (bits / 8 > in_.remaining()) {
      in_.Fail("absent bits", "are " + std::to_string(bits) + ", more than follow");
      return {};
    }
    std::vector<bool> absent(static_cast<std::size_t>(bits));
    for (std::size_t i = 0; i < absent.size() && in_.ok(); i += 8) {
      const std::uint8_t byte = in_.Byte("absent bits");
      for (std::size_t bit = 0; bit < 8; ++bit) {
        const bool set = ((byte >> bit) & 1) != 0;
        if (i + bit < absent.size()) {
          absent[i + bit] = set;
        } else if (set) {
          in_.Fail("absent bits", "are not padded with zeros");
        }
      }
    }
    return absent;
  }

  SetNumber GetSet() {
    return static_cast<SetNumber>(in_.Varint("set", std::numeric_limits<SetNumber>::max()));
  }

  int GetMember(const char* field) {
    return static_cast<int>(static_cast<std::int64_t>(in_.Varint(field, kMaxRank + 1)) - 1);
  }

  StatusCode GetCode() {
    const std::uint8_t code = in_.ByteUpTo("status code", kLastCode);
    if (code == 0) in_.Fail("status code", "says that nothing failed");
    return static_cast<StatusCode>(code);
  }

  ByteReader in_;
};

}  // namespace

Status Decode(std::span<const std::byte> bytes, Message* message) {
  try {
    return MessageReader(bytes).Get(message);
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
