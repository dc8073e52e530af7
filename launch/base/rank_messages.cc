#include "launch/base/rank_messages.h"

#include <cstddef>
#include <span>

#include "core/base/byte_codec.h"
#include "launch/base/max_ranks.h"

namespace sirtaki::launch {

using core::ByteReader;
using core::ByteWriter;
using core::Status;
using core::StatusCode;

namespace {

constexpr std::size_t kHead = 4;
constexpr std::size_t kMaxText = 4096;

struct Writer {
  ByteWriter* out;

  void operator()(const HelloMessage& hello) const {
    for (const int value : {hello.rank, hello.size, hello.local_rank}) {
      out->Varint(static_cast<std::uint64_t>(value));
    }
    out->Text(hello.host);
    out->Varint(static_cast<std::uint64_t>(hello.port));
  }
  void operator()(const OutputMessage& output) const {
    out->Byte(static_cast<std::uint8_t>(output.stream));
    out->Text(output.bytes);
  }
  void operator()(const EndMessage& end) const {
    out->Byte(static_cast<std::uint8_t>(end.kind));
    out->Varint(static_cast<std::uint64_t>(end.value));
    out->Text(std::string_view(end.text).substr(0, kMaxText));
    out->Byte(end.told ? 1 : 0);
  }
  void operator()(const GoMessage& go) const {
    out->Text(go.master_address);
    out->Varint(static_cast<std::uint64_t>(go.master_port));
    out->Text(go.devices);
  }
  void operator()(const StopMessage& /*stop*/) const {}
  void operator()(const WrittenMessage& written) const { out->Varint(written.bytes); }
  void operator()(const InitMessage& init) const { out->Byte(init.through ? 1 : 0); }
  void operator()(const FaultMessage& fault) const {
    out->Text(std::string_view(fault.text).substr(0, kMaxText));
  }
  void operator()(const ChallengeMessage& opening) const { out->Text(opening.challenge); }
  void operator()(const AnswerMessage& answer) const {
    out->Text(answer.challenge);
    out->Text(answer.proof);
  }
  void operator()(const ProofMessage& proof) const { out->Text(proof.proof); }
  void operator()(const WelcomeMessage& /*welcome*/) const {}
};

int ReadInt(ByteReader* reader, const char* field, int max) {
  return static_cast<int>(reader->Varint(field, static_cast<std::uint64_t>(max)));
}

RankMessage Read(ByteReader* reader) {
  switch (reader->ByteUpTo("kind of message", 11)) {
    case 0: {
      HelloMessage hello;
      hello.rank = ReadInt(reader, "rank", kMaxRanks);
      hello.size = ReadInt(reader, "size", kMaxRanks);
      hello.local_rank = ReadInt(reader, "local rank", kMaxRanks);
      hello.host = reader->Text("host", kMaxText);
      hello.port = ReadInt(reader, "port", 65535);
      return hello;
    }
    case 1: {
      OutputMessage output;
      output.stream = static_cast<Stream>(reader->ByteUpTo("stream", 1));
      output.bytes = reader->Text("output", kMaxOutputBytes);
      return output;
    }
    case 2: {
      EndMessage end;
      end.kind = static_cast<EndKind>(reader->ByteUpTo("kind of end", 2));
      end.value = ReadInt(reader, "value", 65535);
      end.text = reader->Text("text", kMaxText);
      end.told = reader->ByteUpTo("told", 1) == 1;
      return end;
    }
    case 3: {
      GoMessage go;
      go.master_address = reader->Text("address", kMaxText);
      go.master_port = ReadInt(reader, "port", 65535);
      go.devices = reader->Text("devices", kMaxText);
      return go;
    }
    case 5:
      return WrittenMessage{reader->Varint("bytes", kMaxUnwritten)};
    case 6:
      return InitMessage{reader->ByteUpTo("through", 1) == 1};
    case 7:
      return FaultMessage{reader->Text("fault", kMaxText)};
    case 8:
      return ChallengeMessage{reader->Text("challenge", kMaxText)};
    case 9: {
      AnswerMessage answer;
      answer.challenge = reader->Text("challenge", kMaxText);
      answer.proof = reader->Text("proof", kMaxText);
      return answer;
    }
    case 10:
      return ProofMessage{reader->Text("proof", kMaxText)};
    case 11:
      return WelcomeMessage{};
    default:
      return StopMessage{};
  }
}

}  // namespace

std::string Encode(const RankMessage& message) {
  ByteWriter writer;
  writer.Byte(static_cast<std::uint8_t>(message.index()));
  std::visit(Writer{&writer}, message);
  const auto bytes = writer.Take();
  std::string frame;
  for (std::size_t i = 0; i < kHead; ++i) {
    frame.push_back(static_cast<char>((bytes.size() >> (8 * i)) & 0xFFU));
  }
  return frame.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Status MessageReader::Next(std::optional<RankMessage>* out) {
  out->reset();
  if (!broken_.ok() || bytes_.size() < kHead) return broken_;
  std::size_t length = 0;
  for (std::size_t i = 0; i < kHead; ++i) {
    length |= std::size_t{static_cast<std::uint8_t>(bytes_[i])} << (8 * i);
  }
  if (length > most_) {
    broken_ = Status(StatusCode::kProtocol,
                     "a message of " + std::to_string(length) + " bytes is too long");
    return broken_;
  }
  if (bytes_.size() < kHead + length) return broken_;
  ByteReader reader(std::as_bytes(std::span(bytes_.data() + kHead, length)));
  RankMessage message = Read(&reader);
  reader.ExpectEnd();
  broken_ = reader.status();
  if (broken_.ok()) *out = std::move(message);
  bytes_.erase(0, kHead + length);
  return broken_;
}

}  // namespace sirtaki::launch
