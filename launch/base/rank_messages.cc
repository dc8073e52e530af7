#include "launch/base/rank_messages.h"

#include <cstddef>
#include <utility>

#include "core/base/byte_codec.h"

namespace sirtaki::launch {

using core::ByteReader;
using core::ByteWriter;
using core::Status;
using core::StatusCode;

namespace {

constexpr std::size_t kHead = 4;
constexpr std::size_t kMaxText = 4096;

constexpr int kMaxPort = 65535;
constexpr int kMaxSignal = 64;

// Reads or writes the fields of a message, in their order.
struct Fields {
  ByteReader* in;  // null: they are written
  ByteWriter* out;

  template <typename Integer>
  void Number(const char* field, Integer& value, Integer max) const {
    if (in == nullptr) return out->Varint(static_cast<std::uint64_t>(value));
    value = static_cast<Integer>(in->Varint(field, static_cast<std::uint64_t>(max)));
  }
  template <typename Choice>
  void Small(const char* field, Choice& value, std::uint8_t max) const {
    if (in == nullptr) return out->Byte(static_cast<std::uint8_t>(value));
    value = static_cast<Choice>(in->ByteUpTo(field, max));
  }
  void Text(const char* field, std::string& text, std::size_t max = kMaxText) const {
    if (in == nullptr) return out->Text(std::string_view(text).substr(0, max));
    text = in->Text(field, max);
  }

  void operator()(HelloMessage& hello) const {
    Number("rank", hello.rank, kMaxRanks);
    Number("size", hello.size, kMaxRanks);
    Number("local rank", hello.local_rank, kMaxRanks);
    Text("host", hello.host);
    Number("port", hello.port, kMaxPort);
  }
  void operator()(OutputMessage& output) const {
    Small("stream", output.stream, 1);
    Text("output", output.bytes, kMaxOutputBytes);
  }
  void operator()(EndMessage& end) const {
    Small("kind of end", end.kind, 2);
    Number("value", end.value, 65535);
    Text("text", end.text);
    Small("told", end.told, 1);
  }
  void operator()(GoMessage& go) const {
    Text("address", go.master_address);
    Number("port", go.master_port, kMaxPort);
    Text("devices", go.devices);
  }
  void operator()(StopMessage& /*stop*/) const {}
  void operator()(WrittenMessage& written) const { Number("bytes", written.bytes, kMaxUnwritten); }
  void operator()(InitMessage& init) const { Small("through", init.through, 1); }
  void operator()(FaultMessage& fault) const { Text("fault", fault.text); }
  void operator()(ChallengeMessage& opening) const { Text("challenge", opening.challenge); }
  void operator()(AnswerMessage& answer) const {
    Text("challenge", answer.challenge);
    Text("proof", answer.proof);
  }
  void operator()(ProofMessage& proof) const { Text("proof", proof.proof); }
  void operator()(WelcomeMessage& /*welcome*/) const {}
  void operator()(SignalMessage& signal) const { Number("signal", signal.signal, kMaxSignal); }
  void operator()(ElasticMessage& elastic) const { Text("notice", elastic.notice); }
};

// An empty message of the kind, which is the place of its type in RankMessage.
template <std::size_t... kKinds>
RankMessage Empty(std::size_t kind, std::index_sequence<kKinds...> /*all*/) {
  RankMessage message;
  ((kKinds == kind ? void(message.emplace<kKinds>()) : void()), ...);
  return message;
}

}  // namespace

std::string Encode(RankMessage message) {
  ByteWriter writer;
  writer.Byte(static_cast<std::uint8_t>(message.index()));
  std::visit(Fields{nullptr, &writer}, message);
  const std::string_view bytes = writer.text();
  std::string frame;
  for (std::size_t i = 0; i < kHead; ++i) {
    frame.push_back(static_cast<char>((bytes.size() >> (8 * i)) & 0xFFU));
  }
  return frame.append(bytes);
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
  ByteReader reader(std::string_view(bytes_).substr(kHead, length));
  constexpr std::size_t kKinds = std::variant_size_v<RankMessage>;
  RankMessage message =
      Empty(reader.ByteUpTo("kind of message", kKinds - 1), std::make_index_sequence<kKinds>());
  std::visit(Fields{&reader, nullptr}, message);
  reader.ExpectEnd();
  broken_ = reader.status();
  if (broken_.ok()) *out = std::move(message);
  bytes_.erase(0, kHead + length);
  return broken_;
}

}  // namespace sirtaki::launch
