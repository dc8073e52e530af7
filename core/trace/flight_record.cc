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

// More ranks than any job has.
constexpr int kMostRanks = 1 << 24;
// Some 36 years: four such times have a sum.
constexpr std::int64_t kLongestTime = std::int64_t{1} << 60;
constexpr std::int64_t kLastUnixTime = 253402300799'999'999;  // of the year 9999

template <typename Number>
Number In(const json& value, Number least = std::numeric_limits<Number>::min(),
          Number most = std::numeric_limits<Number>::max()) {
  const bool is_unsigned = value.is_number_unsigned();
  if (!is_unsigned && !value.is_number_integer()) {
    throw std::invalid_argument(std::string("a field holds ") + value.type_name() +
                                ", not a whole number");
  }
  const bool fits = is_unsigned ? std::cmp_greater_equal(value.get<std::uint64_t>(), least) &&
                                      std::cmp_less_equal(value.get<std::uint64_t>(), most)
                                : std::cmp_greater_equal(value.get<std::int64_t>(), least) &&
                                      std::cmp_less_equal(value.get<std::int64_t>(), most);
  if (!fits) throw std::invalid_argument("a number is out of range: " + value.dump());
  return value.get<Number>();
}

std::chrono::nanoseconds NanosecondsIn(const json& value) {
  return std::chrono::nanoseconds(In<std::int64_t>(value, -kLongestTime, kLongestTime));
}
TimePoint TimeIn(const json& value) {
  return TimePoint(std::chrono::duration_cast<Duration>(NanosecondsIn(value)));
}

json RangesToJson(const RankRanges& ranks) {
  json list = json::array();
  for (const RankRange& range : ranks.ranges()) list.push_back({range.first, range.last});
  return list;
}

RankRanges RangesFromJson(const json& list, int size) {
  RankRanges ranks;
  for (const json& range : list) {
    const int first = In<int>(range.at(0), 0, size - 1);
    ranks.Add(RankRanges::Span(first, In<int>(range.at(1), first, size - 1)));
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
  if (kind == kEventKindCount) throw std::invalid_argument("an event has the unknown kind " + name);
  event.kind = static_cast<EventKind>(kind);
  const auto number = [&line]<typename Number>(const char* field, Number most) {
    return line.contains(field) ? In<Number>(line[field], 0, most) : Number{0};
  };
  event.begin = TimeIn(line.at("t"));
  event.end = line.contains("end") ? TimeIn(line["end"]) : event.begin;
  event.SetText(line.value("text", std::string()));
  event.set = number("set", std::numeric_limits<std::uint32_t>::max());
  event.number = number("number", std::numeric_limits<std::uint64_t>::max());
  event.bytes = number("bytes", std::numeric_limits<std::int64_t>::max());
  event.count = number("count", std::numeric_limits<std::uint32_t>::max());
  event.thread = number("thread", std::numeric_limits<std::uint32_t>::max());
  event.track = static_cast<Track>(number("track", static_cast<int>(Track::kPipeline)));
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
  const int code = In<int>(fault.at("code"), 1, static_cast<int>(kLastStatusCode));
  return {static_cast<StatusCode>(code),
          fault.at("text").get<std::string>(),
          {In<int>(fault.at("rank")), fault.at("host").get<std::string>(),
           fault.at("tensor").get<std::string>()}};
}

FlightRecord Read(const json& from) {
  FlightRecord record;
  if (In<std::int64_t>(from.at("flight_record")) != kFormat) {
    throw std::invalid_argument("it was written by another version of Sirtaki");
  }
  record.size = In<int>(from.at("size"), 1, kMostRanks);
  record.rank = In<int>(from.at("rank"), 0, record.size - 1);
  from.at("host").get_to(record.host);
  record.pid = In<std::int64_t>(from.at("pid"));
  from.at("version").get_to(record.version);
  from.at("session").get_to(record.session);
  from.at("why").get_to(record.why);
  from.at("missing").get_to(record.missing);
  record.doing = from.value("doing", std::string());
  record.fault = FaultFromJson(from.at("fault"));
  record.unix_us = In<std::int64_t>(from.at("unix_us"), 0, kLastUnixTime);
  record.now = TimeIn(from.at("now"));
  record.offset = std::chrono::duration_cast<Duration>(NanosecondsIn(from.at("offset")));
  if (from.contains("leaving")) record.leaving = TimeIn(from["leaving"]);
  for (const json& set : from.at("sets")) {
    record.sets.push_back({In<std::uint32_t>(set.at("set")),
                           RangesFromJson(set.at("members"), record.size),
                           In<std::uint64_t>(set.at("submitted")), set.at("joined").get<bool>()});
  }
  for (const json& call : from.at("pending")) {
    record.pending.push_back({In<std::uint32_t>(call.at("set")), call.at("key").get<std::string>(),
                              call.at("what").get<std::string>(),
                              In<std::uint64_t>(call.at("number")), TimeIn(call.at("since"))});
  }
  for (const json& running : from.at("running")) {
    record.running.push_back({In<std::uint32_t>(running.at("set")),
                              running.at("what").get<std::string>(), TimeIn(running.at("since"))});
  }
  for (const json& event : from.at("events")) record.events.push_back(EventFromJson(event));
  record.lost = In<std::uint64_t>(from.at("lost"));
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
  if (!record.doing.empty()) head["doing"] = record.doing;
  if (record.leaving) head["leaving"] = Nanoseconds(*record.leaving);
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
    return {StatusCode::kInvalidArgument, std::string("not a flight record: ") + error.what()};
  }
}

}  // namespace sirtaki::core::trace
