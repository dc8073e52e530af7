#include "core/machine/elastic_notice.h"

#include <algorithm>
#include <cstddef>

#include "core/base/byte_codec.h"

namespace sirtaki::core {

namespace {

constexpr auto kLastKind = static_cast<std::uint8_t>(ElasticNotice::Kind::kIsStopped);
constexpr std::uint64_t kMaxGeneration = 1 << 30;
constexpr std::uint64_t kMaxRank = 1 << 20;
constexpr std::uint64_t kMaxPort = 65535;
constexpr std::size_t kMaxText = 1200;
constexpr std::size_t kMaxRanks = 200;  // of three bytes at most

}  // namespace

std::string Encode(const ElasticNotice& notice) {
  ByteWriter out;
  out.Byte(static_cast<std::uint8_t>(notice.kind));
  for (const int number : {notice.generation, notice.rank, notice.size, notice.port}) {
    out.Varint(static_cast<std::uint64_t>(number));
  }
  out.Text(std::string_view(notice.text).substr(0, kMaxText));
  const std::size_t count = std::min(notice.ranks.size(), kMaxRanks);
  out.Varint(count);
  for (std::size_t i = 0; i < count; ++i) out.Varint(static_cast<std::uint64_t>(notice.ranks[i]));
  return std::string(out.text());
}

std::optional<ElasticNotice> DecodeElasticNotice(std::string_view bytes) {
  ByteReader in(bytes);
  ElasticNotice notice;
  notice.kind = static_cast<ElasticNotice::Kind>(in.ByteUpTo("kind of notice", kLastKind));
  notice.generation = static_cast<int>(in.Varint("generation", kMaxGeneration));
  notice.rank = static_cast<int>(in.Varint("rank", kMaxRank));
  notice.size = static_cast<int>(in.Varint("size", kMaxRank));
  notice.port = static_cast<int>(in.Varint("port", kMaxPort));
  notice.text = in.Text("text", kMaxText);
  for (std::size_t left = in.Count("ranks", 1, kMaxRanks); left > 0 && in.ok(); --left) {
    notice.ranks.push_back(static_cast<int>(in.Varint("rank", kMaxRank)));
  }
  in.ExpectEnd();
  if (!in.ok()) return std::nullopt;
  return notice;
}

}  // namespace sirtaki::core
