#include "core/trace/flight_record.h"

#include <chrono>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace sirtaki::core::trace {
namespace {

using nlohmann::json;

constexpr int kFormat = 1;

std::int64_t Nanoseconds(TimePoint time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}
TimePoint AtNanoseconds(std::int64_t count) {
  return TimePoint(std::chrono::duration_cast<Duration>(std::chrono::nanoseconds(count)));
}

json RangesToJson(const RankRanges& ranks) {
  json list = json::array();
  for (const RankRange& range : ranks.ranges()) list.push_back({range.first, range.last});
  return list;
}

RankRanges RangesFromJson(const json& list) {
  RankRanges ranks;
  for (const json& range : list) {
    const int first = range.at(0).get<int>();
    const int last = range.at(1).get<int>();
    if (first < 0 || last < first) throw std::invalid_argument("a range of ranks that is none");
    ranks.Add(RankRanges::Span(first, last));
  }
  return ranks;
}

json EventToJson(const Event& event) {
  json line = {{"kind", EventKindName(event.kind)}, {"t", Nanoseconds(event.begin)}};
  if (event.end != event.begin) line["end"] = Nanoseconds(event.end);
  if (!event.text().empty()) line["text"] = event.text();
  if (event.set != 0) line["set"] = event.set;
  if (event.number != 0) line["number"] = event.number;
  if (event.bytes != 0) line["bytes"] = event.bytes;
  if (event.count != 0) line["count"] = event.count;
  if (event.thread != 0) line["thread"] = event.thread;
  if (event.track != Track::kProgram) line["track"] = static_cast<int>(event.track);
  return line;
}

Event EventFromJson(const json& line) {
  Event event;
  const auto name = line.at("kind").get<std::string>();
  int kind = 0;
  while (kind < kEventKindCount && EventKindName(static_cast<EventKind>(kind)) != name) ++kind;
  if (kind == kEventKindCount) throw std::invalid_argument("an event of unknown kind " + name);
  event.kind = static_cast<EventKind>(kind);
  event.begin = AtNanoseconds(line.at("t").get<std::int64_t>());
  event.end = line.contains("end") ? AtNanoseconds(line["end"].get<std::int64_t>()) : event.begin;
  event.SetText(line.value("text", std::string()));
  event.set = line.value("set", std::uint32_t{0});
  event.number = line.value("number", std::uint64_t{0});
  event.bytes = line.value("bytes", std::int64_t{0});
  event.count = line.value("count", std::uint32_t{0});
  event.thread = line.value("thread", std::uint32_t{0});
  const int track = line.value("track", 0);
  if (track < 0 || track > static_cast<int>(Track::kDevice)) {
    throw std::invalid_argument("an event of an unknown track");
  }
  event.track = static_cast<Track>(track);
  return event;
}

json FaultToJson(const Status& fault) {
  if (fault.ok()) return nullptr;
  return {{"code", static_cast<int>(fault.code())},
          {"text", fault.message()},
          {"rank", fault.origin().rank},
          {"host", fault.origin().host},
          {"tensor", fault.origin().tensor}};
}

Status FaultFromJson(const json& fault) {
  if (fault.is_null()) return Status::Ok();
  const int code = fault.at("code").get<int>();
  if (code <= 0 || code > static_cast<int>(StatusCode::kUnsupported)) {
    throw std::invalid_argument("a fault of unknown code");
  }
  return {static_cast<StatusCode>(code),
          fault.at("text").get<std::string>(),
          {fault.at("rank").get<int>(), fault.at("host").get<std::string>(),
           fault.at("tensor").get<std::string>()}};
}

FlightRecord Read(const json& from) {
  FlightRecord record;
  if (from.at("flight_record").get<int>() != kFormat) {
    throw std::invalid_argument("a flight record of another version of the library");
  }
  from.at("rank").get_to(record.rank);
  from.at("size").get_to(record.size);
  if (record.size < 1 || record.rank < 0 || record.rank >= record.size) {
    throw std::invalid_argument("a rank outside of its world");
  }
  from.at("host").get_to(record.host);
  from.at("pid").get_to(record.pid);
  from.at("version").get_to(record.version);
  from.at("session").get_to(record.session);
  from.at("why").get_to(record.why);
  from.at("missing").get_to(record.missing);
  record.fault = FaultFromJson(from.at("fault"));
  from.at("unix_us").get_to(record.unix_us);
  record.now = AtNanoseconds(from.at("now").get<std::int64_t>());
  record.offset = std::chrono::duration_cast<Duration>(
      std::chrono::nanoseconds(from.at("offset").get<std::int64_t>()));
  for (const json& set : from.at("sets")) {
    record.sets.push_back({set.at("set").get<std::uint32_t>(), RangesFromJson(set.at("members")),
                           set.at("submitted").get<std::uint64_t>(), set.at("joined").get<bool>()});
  }
  for (const json& call : from.at("pending")) {
    record.pending.push_back({call.at("set").get<std::uint32_t>(),
                              call.at("key").get<std::string>(), call.at("what").get<std::string>(),
                              call.at("number").get<std::uint64_t>(),
                              AtNanoseconds(call.at("since").get<std::int64_t>())});
  }
  for (const json& running : from.at("running")) {
    record.running.push_back({running.at("set").get<std::uint32_t>(),
                              running.at("what").get<std::string>(),
                              AtNanoseconds(running.at("since").get<std::int64_t>())});
  }
  for (const json& event : from.at("events")) record.events.push_back(EventFromJson(event));
  from.at("lost").get_to(record.lost);
  return record;
}

}  // namespace

// The head on a line of its own, then a line for each event: for people, and for `grep`.
std::string FlightRecordToJson(const FlightRecord& record) {
  json head = {{"flight_record", kFormat},
               {"rank", record.rank},
               {"size", record.size},
               {"host", record.host},
               {"pid", record.pid},
               {"version", record.version},
               {"session", record.session},
               {"why", record.why},
               {"missing", record.missing},
               {"fault", FaultToJson(record.fault)},
               {"unix_us", record.unix_us},
               {"now", Nanoseconds(record.now)},
               {"offset", std::chrono::nanoseconds(record.offset).count()},
               {"sets", json::array()},
               {"pending", json::array()},
               {"running", json::array()},
               {"lost", record.lost}};
  for (const FlightRecord::Set& set : record.sets) {
    head["sets"].push_back({{"set", set.number},
                            {"members", RangesToJson(set.members)},
                            {"submitted", set.submitted},
                            {"joined", set.joined}});
  }
  for (const FlightRecord::Pending& call : record.pending) {
    head["pending"].push_back({{"set", call.set},
                               {"key", call.key},
                               {"what", call.what},
                               {"number", call.number},
                               {"since", Nanoseconds(call.since)}});
  }
  for (const FlightRecord::Running& running : record.running) {
    head["running"].push_back(
        {{"set", running.set}, {"what", running.what}, {"since", Nanoseconds(running.since)}});
  }
  constexpr auto kReplace = json::error_handler_t::replace;
  std::string text = head.dump(-1, ' ', false, kReplace);
  text.pop_back();  // the brace
  text += ",\n\"events\":[";
  for (std::size_t i = 0; i < record.events.size(); ++i) {
    text += i == 0 ? "\n" : ",\n";
    text += EventToJson(record.events[i]).dump(-1, ' ', false, kReplace);
  }
  return text + "\n]}\n";
}

Status FlightRecordFromJson(std::string_view text, FlightRecord* record) {
  try {
    *record = Read(json::parse(text));
    return Status::Ok();
  } catch (const std::exception& error) {
    return {StatusCode::kInvalidArgument, std::string("no flight record: ") + error.what()};
  }
}

}  // namespace sirtaki::core::trace
