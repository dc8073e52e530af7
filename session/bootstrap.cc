#include "session/bootstrap.h"

#include <bit>
#include <cstddef>
#include <random>
#include <vector>

#include "core/base/byte_codec.h"

namespace sirtaki::session {

using core::ByteReader;
using core::ByteWriter;
using core::Status;
using core::StatusCode;

namespace {

constexpr std::size_t kMaxText = std::size_t{1} << 20;
constexpr std::size_t kMaxRanges = std::size_t{1} << 16;

void Put(const Status& status, ByteWriter& out) {
  out.Byte(static_cast<std::uint8_t>(status.code()));
  out.Text(std::string_view(status.message()).substr(0, kMaxText));
}

Status GetStatus(ByteReader& in) {
  constexpr auto kLastCode = static_cast<std::uint8_t>(core::kLastStatusCode);
  const auto code = static_cast<StatusCode>(in.ByteUpTo("status code", kLastCode));
  std::string message = in.Text("status text", kMaxText);
  return code == StatusCode::kOk ? Status::Ok() : Status(code, std::move(message));
}

std::uint64_t RandomToken() {
  std::random_device device;
  return (std::uint64_t{device()} << 32) ^ device();
}

}  // namespace

Greeting Greet(const Status& parsed, const core::Config& config) {
  return {parsed, config, core::CpusOfThisProcess(), RandomToken(), core::Clock::now()};
}

std::string Serialize(const Greeting& greeting) {
  ByteWriter out;
  Put(greeting.status, out);
  out.Text(core::SerializeConfig(greeting.config));
  out.Varint(greeting.cpus.cpus.ranges().size());
  for (const core::RankRange& range : greeting.cpus.cpus.ranges()) {
    out.Varint(static_cast<std::uint64_t>(range.first));
    out.Varint(static_cast<std::uint64_t>(range.last));
  }
  out.Fixed64(std::bit_cast<std::uint64_t>(greeting.cpus.quota));
  out.Fixed64(greeting.token);
  out.Fixed64(static_cast<std::uint64_t>(greeting.clock.time_since_epoch().count()));
  return std::string(out.text());
}

Status Deserialize(std::string_view bytes, Greeting* greeting) {
  constexpr std::uint64_t kMaxCpu = 1 << 24;
  ByteReader in(bytes);
  greeting->status = GetStatus(in);
  const std::string config = in.Text("options", kMaxText);
  greeting->cpus.cpus.Clear();
  for (std::size_t left = in.Count("cpu ranges", 2, kMaxRanges); left > 0 && in.ok(); --left) {
    const auto first = static_cast<int>(in.Varint("first cpu", kMaxCpu));
    const auto last = static_cast<int>(in.Varint("last cpu", kMaxCpu));
    greeting->cpus.cpus.Add(core::RankRanges::Span(first, last));
  }
  greeting->cpus.quota = std::bit_cast<double>(in.Fixed64("quota"));
  if (!(greeting->cpus.quota >= 0)) greeting->cpus.quota = 0;
  greeting->token = in.Fixed64("token");
  greeting->clock = core::TimePoint(core::Duration(static_cast<std::int64_t>(in.Fixed64("clock"))));
  in.ExpectEnd();
  if (!in.ok()) return in.status();
  return core::DeserializeConfig(config, &greeting->config);
}

std::string SerializeStatus(const Status& status) {
  ByteWriter out;
  Put(status, out);
  return std::string(out.text());
}

Status FirstFailure(std::span<const std::string> serialized_by_rank) {
  std::vector<Status> statuses;
  for (const std::string& bytes : serialized_by_rank) {
    ByteReader in(bytes);
    Status status = GetStatus(in);
    statuses.push_back(in.ok() ? std::move(status) : in.status());
  }
  return core::FirstFailure(statuses);
}

}  // namespace sirtaki::session
