#include "core/machine/elastic_notice.h"

#include <cstddef>
#include <cstdint>

#include "core/base/byte_codec.h"
#include "core/machine/start_notice.h"

namespace sirtaki::core {

namespace {

constexpr auto kLastKind = static_cast<std::uint8_t>(ElasticNotice::Kind::kIsStopped);
constexpr std::uint64_t kMaxGeneration = 1 << 30;
constexpr std::uint64_t kMaxRank = 1 << 20;
constexpr std::uint64_t kMaxPort = 65535;
constexpr std::size_t kMaxLengthBytes = 2;  // of a text that fits

}  // namespace

std::string Encode(const ElasticNotice& notice) {
  ByteWriter out;
  out.Byte(static_cast<std::uint8_t>(notice.kind));
  for (const int number : {notice.generation, notice.rank, notice.size, notice.port}) {
    out.Varint(static_cast<std::uint64_t>(number));
  }
  // Most ranges take two or three bytes. Gaps and ranges that take three bytes each are few, since they
  // are long.
  out.Varint(notice.ranks.ranges().size());
  int next = 0;
  for (const RankRange& range : notice.ranks.ranges()) {
    out.Varint(static_cast<std::uint64_t>(range.first - next));
    out.Varint(static_cast<std::uint64_t>(range.last - range.first));
    next = range.last + 1;
  }
  const std::size_t used = out.text().size() + kMaxLengthBytes;
  const std::size_t room = kMaxNoticeText > used ? kMaxNoticeText - used : 0;
  out.Text(std::string_view(notice.text).substr(0, room));
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
  std::uint64_t next = 0;
  for (std::size_t left = in.Count("ranges", 2, kMostRangesOfNotice); left > 0; --left) {
    const std::uint64_t first = next + in.Varint("gap", kMaxRank);
    const std::uint64_t last = first + in.Varint("more ranks", kMaxRank);
    if (last > kMaxRank) in.Fail("more ranks", "there are none");
    if (!in.ok()) return std::nullopt;
    notice.ranks.Add(RankRanges::Span(static_cast<int>(first), static_cast<int>(last)));
    next = last + 1;
  }
  notice.text = in.Text("text", kMaxNoticeText);
  in.ExpectEnd();
  if (!in.ok()) return std::nullopt;
  return notice;
}

}  // namespace sirtaki::core
