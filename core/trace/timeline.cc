#include "core/trace/timeline.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>

namespace sirtaki::core::trace {
namespace {

// Numbers of tracks as a trace has them. Those of the program's threads follow kFirstThread, those
// of devices kFirstDevice.
constexpr std::uint32_t kNegotiationTrack = 1;
constexpr std::uint32_t kSmallTrack = 2;
constexpr std::uint32_t kLargeTrack = 3;
constexpr std::uint32_t kFirstDevice = 10;
constexpr std::uint32_t kFirstThread = 1000;

// One write is not longer, so that an end in the middle of one is unlikely to be seen.
constexpr std::size_t kWriteBytes = std::size_t{64} << 10;

constexpr std::string_view kClosing = "\n]\n";

// What the last line of a file that is full may take, with what closes it.
constexpr std::size_t kLastBytes = 256;

// With quotes. What is no UTF-8 becomes U+FFFD.
std::string Json(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::uint32_t TrackNumber(const Event& event) {
  switch (event.track) {
    case Track::kNegotiation:
      return kNegotiationTrack;
    case Track::kSmallLane:
      return kSmallTrack;
    case Track::kLargeLane:
      return kLargeTrack;
    case Track::kDevice:
      return kFirstDevice + event.thread;
    case Track::kProgram:
      break;
  }
  return kFirstThread + event.thread;
}

// Microseconds, to the nanosecond.
std::string Microseconds(Duration duration) {
  const std::int64_t ns = std::chrono::nanoseconds(duration).count();
  char text[40];
  std::snprintf(text, sizeof text, "%s%lld.%03lld", ns < 0 ? "-" : "",
                static_cast<long long>(std::abs(ns / 1000)),
                static_cast<long long>(std::abs(ns % 1000)));
  return text;
}

std::string TimeOf(const TimelineIdentity& identity, TimePoint time) {
  return Microseconds(time + identity.offset - identity.origin);
}

std::string Arguments(const Event& event) {
  std::string text;
  const auto add = [&text](std::string_view name, auto value) {
    text += (text.empty() ? "\"" : ",\"") + std::string(name) + "\":" + std::to_string(value);
  };
  if (event.number != 0 || event.kind == EventKind::kSubmit) add("number", event.number);
  if (event.bytes != 0) add("bytes", event.bytes);
  if (event.count != 0) add("count", event.count);
  if (event.set != 0) add("set", event.set);
  return "{" + text + "}";
}

// What stands on a bar: what it is, and of what.
std::string Title(const Event& event) {
  switch (event.kind) {
    case EventKind::kMark:
    case EventKind::kNegotiate:
    case EventKind::kFinish:
    case EventKind::kBegin:
      return std::string(event.text());
    default:
      break;
  }
  std::string title(EventKindName(event.kind));
  if (event.kind == EventKind::kStep) title += " " + std::to_string(event.number);
  if (!event.text().empty()) title += ": " + std::string(event.text());
  return title;
}

// With others of its track. The small lane has several groups under way, and a step begins in the
// middle of what the program has marked.
bool Overlaps(const Event& event) {
  switch (event.kind) {
    case EventKind::kNegotiate:
    case EventKind::kQueue:
    case EventKind::kWaitFor:
    case EventKind::kStep:
      return true;
    default:
      return event.track == Track::kSmallLane && event.end != event.begin;
  }
}

struct LineParts {
  std::string_view phase;
  std::string time;
  std::string more;  // other fields, each after a comma
};

std::string Line(const TimelineIdentity& identity, const Event& event, const LineParts& parts) {
  return "{\"name\":" + Json(Title(event)) + ",\"cat\":\"" +
         std::string(EventKindName(event.kind)) + "\",\"ph\":\"" + std::string(parts.phase) +
         "\",\"ts\":" + parts.time + ",\"pid\":" + std::to_string(identity.rank) +
         ",\"tid\":" + std::to_string(TrackNumber(event)) + parts.more +
         ",\"args\":" + Arguments(event) + "}";
}

std::string NameLine(const TimelineIdentity& identity, std::string_view what, std::uint32_t track,
                     const std::string& name) {
  return "{\"name\":\"" + std::string(what) +
         "\",\"ph\":\"M\",\"pid\":" + std::to_string(identity.rank) +
         ",\"tid\":" + std::to_string(track) + ",\"args\":{\"name\":" + Json(name) + "}}";
}

std::string LastLine(const TimelineIdentity& identity) {
  return R"({"name":"the timeline is full: what comes after this is not in it","ph":"i","s":"p",)"
         "\"ts\":0,\"pid\":" +
         std::to_string(identity.rank) + ",\"tid\":0}";
}

}  // namespace

void AppendNames(const TimelineIdentity& identity, std::vector<std::string>* lines) {
  const std::string rank = "rank " + std::to_string(identity.rank);
  lines->push_back(NameLine(identity, "process_name", 0,
                            identity.host.empty() ? rank : rank + " on " + identity.host));
  lines->push_back(
      "{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":" + std::to_string(identity.rank) +
      ",\"tid\":0,\"args\":{\"sort_index\":" + std::to_string(identity.rank) + "}}");
  lines->push_back(NameLine(identity, "thread_name", kNegotiationTrack, "negotiation"));
  lines->push_back(NameLine(identity, "thread_name", kSmallTrack, "small lane"));
  lines->push_back(NameLine(identity, "thread_name", kLargeTrack, "large lane"));
}

void AppendLines(const TimelineIdentity& identity, const Event& event,
                 std::vector<std::string>* lines) {
  const std::string begin = TimeOf(identity, event.begin);
  if (Overlaps(event)) {
    // Each is a line of its own, known by its number.
    const std::string id = ",\"id2\":{\"local\":\"" + std::string(EventKindName(event.kind)) + " " +
                           std::to_string(event.number) + " " +
                           std::to_string(event.begin.time_since_epoch().count()) + "\"}";
    lines->push_back(Line(identity, event, {"b", begin, id}));
    lines->push_back(Line(identity, event, {"e", TimeOf(identity, event.end), id}));
    return;
  }
  if (event.kind == EventKind::kBegin) return;  // what it began is told when it is over
  if (event.end != event.begin) {
    lines->push_back(
        Line(identity, event, {"X", begin, ",\"dur\":" + Microseconds(event.end - event.begin)}));
  } else {
    lines->push_back(Line(identity, event, {"i", begin, ",\"s\":\"t\""}));
  }
}

TimelineFile::~TimelineFile() { Close(); }

Status TimelineFile::Open(const std::string& path, const TimelineIdentity& identity,
                          std::int64_t max_bytes) {
  Close();
  path_ = path;
  identity_ = identity;
  max_bytes_ = max_bytes;
  end_ = 0;
  empty_ = true;
  full_ = false;
  descriptor_ = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) {
    return {StatusCode::kBackend,
            "the timeline \"" + path + "\" cannot be made: " + std::strerror(errno)};
  }
  std::vector<std::string> names;
  AppendNames(identity_, &names);
  return Write(names);
}

Status TimelineFile::Append(std::span<const Event> events) {
  std::vector<std::string> lines;
  for (const Event& event : events) AppendLines(identity_, event, &lines);
  return lines.empty() || descriptor_ < 0 ? Status::Ok() : Write(lines);
}

// From the closing bracket on: what stood before it stays.
Status TimelineFile::Write(const std::vector<std::string>& lines) {
  std::string text;
  const auto flush = [&] {
    const std::int64_t begin = end_;
    end_ += static_cast<std::int64_t>(text.size());
    text += kClosing;
    for (std::size_t done = 0; done < text.size();) {
      const ssize_t written = pwrite(descriptor_, text.data() + done, text.size() - done,
                                     begin + static_cast<std::int64_t>(done));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        const int why = errno;
        // Whole up to where it was.
        if (ftruncate(descriptor_, begin) == 0) {
          (void)!pwrite(descriptor_, kClosing.data(), kClosing.size(), begin);
        }
        Close();
        return Status(StatusCode::kBackend,
                      "the timeline \"" + path_ + "\" cannot be written: " + std::strerror(why));
      }
      done += static_cast<std::size_t>(written);
    }
    text.clear();
    return Status::Ok();
  };
  for (const std::string& line : lines) {
    if (full_) break;
    const auto size = static_cast<std::int64_t>(text.size() + line.size() + kLastBytes);
    full_ = max_bytes_ > 0 && end_ + size > max_bytes_;
    text += empty_ ? "[\n" : ",\n";
    empty_ = false;
    text += full_ ? LastLine(identity_) : line;
    if (text.size() < kWriteBytes) continue;
    if (Status status = flush(); !status.ok()) return status;
  }
  return text.empty() ? Status::Ok() : flush();
}

void TimelineFile::Close() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

}  // namespace sirtaki::core::trace
