#include "core/trace/timeline.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <string_view>

namespace sirtaki::core::trace {
namespace {

// Numbers of tracks as a trace has them. Those of the program's threads follow kFirstThread, those
// of pipelines kFirstPipeline, those of devices kFirstDevice.
constexpr std::uint32_t kNegotiationTrack = 1;
constexpr std::uint32_t kSmallTrack = 2;
constexpr std::uint32_t kLargeTrack = 3;
constexpr std::uint32_t kFirstDevice = 10;
constexpr std::uint32_t kFirstPipeline = 500;
constexpr std::uint32_t kFirstThread = 1000;

// One write is not longer, so that an end in the middle of one is unlikely to be seen.
constexpr std::size_t kWriteBytes = std::size_t{64} << 10;

constexpr std::string_view kBetween = ",\n";
constexpr std::string_view kClosing = "\n]\n";

// More than are under way at once.
constexpr std::size_t kMostBegun = 65536;

// The last line of a file that is full may take this, with what closes it.
constexpr std::size_t kLastBytes = 256;

void AppendNumber(std::int64_t number, std::string* text) {
  std::array<char, 24> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  text->append(digits.data(), end);
}

// The text is put in quotes. What is no UTF-8 becomes U+FFFD.
void AppendJson(std::string_view words, std::string* text) {
  const bool plain = std::all_of(words.begin(), words.end(), [](char c) {
    return c >= ' ' && c <= '~' && c != '"' && c != '\\';
  });
  if (plain) {
    text->append(1, '"').append(words).append(1, '"');
  } else {
    *text += nlohmann::json(words).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }
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
    case Track::kPipeline:
      return kFirstPipeline + event.thread % (kFirstThread - kFirstPipeline);
    case Track::kProgram:
      break;
  }
  return kFirstThread + event.thread;
}

// Viewers treat process 0 as none.
int ProcessOf(const TimelineIdentity& identity) { return identity.rank + 1; }

// Microseconds, to the nanosecond.
void AppendTime(Duration duration, std::string* text) {
  const std::int64_t ns = std::chrono::nanoseconds(duration).count();
  if (ns < 0) *text += '-';
  AppendNumber(std::abs(ns / 1000), text);
  const std::int64_t rest = std::abs(ns % 1000);
  *text += {'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10),
            static_cast<char>('0' + rest % 10)};
}

void AppendArguments(const Event& event, std::string* text) {
  std::string_view before = "{\"";
  const auto add = [&](std::string_view name, std::int64_t value) {
    text->append(before).append(name).append("\":");
    AppendNumber(value, text);
    before = ",\"";
  };
  if (event.number != 0 || event.kind == EventKind::kSubmit) {
    add("number", static_cast<std::int64_t>(event.number));
  }
  if (event.bytes != 0) add("bytes", event.bytes);
  if (event.count != 0) add("count", event.count);
  if (event.set != 0) add("set", event.set);
  *text += before == "{\"" ? "{}" : "}";
}

// The title stands on a bar: what it is, and of what.
std::string Title(const Event& event) {
  switch (event.kind) {
    case EventKind::kMark:
    case EventKind::kPass:
    case EventKind::kSubmit:
    case EventKind::kNegotiate:
    case EventKind::kFinish:
    case EventKind::kBegin:
      return std::string(event.text());
    default:
      break;
  }
  std::string title(event.kind == EventKind::kWait ? "wait for data" : EventKindName(event.kind));
  if (!event.text().empty()) title += ": " + std::string(event.text());
  return title;
}

// True if the event overlaps others of its track. The small lane has several groups under way, and
// a step begins in the middle of what the program has marked.
bool Overlaps(const Event& event) {
  switch (event.kind) {
    case EventKind::kSubmit:
      return event.alone == 0;
    case EventKind::kNegotiate:
    case EventKind::kQueue:
    case EventKind::kStep:
      return true;
    default:
      return event.track == Track::kSmallLane &&
             (event.end != event.begin || event.kind == EventKind::kBegin);
  }
}

// A submission begins what is told when it is agreed on, and a group what is told when it is over:
// so there is a bar of what never is. Those of devices run into each other.
bool Begins(const Event& event) {
  return (event.kind == EventKind::kSubmit && event.alone == 0) ||
         (event.kind == EventKind::kBegin && event.track != Track::kDevice);
}
bool Ends(const Event& event) {
  return event.kind == EventKind::kNegotiate ||
         (event.kind == EventKind::kFinish && event.track != Track::kDevice);
}

// The category is what an event belongs to.
std::string_view CategoryOf(const Event& event) {
  if (event.kind == EventKind::kSubmit && event.alone == 0) {
    return EventKindName(EventKind::kNegotiate);
  }
  if (event.kind == EventKind::kBegin) return EventKindName(EventKind::kFinish);
  return EventKindName(event.kind);
}

// An id is the same for what begins and for what ends it, and differs from all others of its kind.
std::string IdOf(const Event& event) {
  std::string id(CategoryOf(event));
  id += ' ';
  AppendNumber(event.begin.time_since_epoch().count(), &id);
  id += ' ';
  if (event.kind == EventKind::kSubmit || event.kind == EventKind::kNegotiate) {
    AppendNumber(static_cast<std::int64_t>(std::hash<std::string_view>{}(event.text()) >> 1U), &id);
  } else {
    AppendNumber(static_cast<std::int64_t>(event.number), &id);
  }
  return id;
}

// One of the objects of the event. Times are of rank 0's clock, from the origin.
void AppendLine(const TimelineIdentity& identity, const Event& event, std::string_view phase,
                std::string* text) {
  const Duration to_trace = identity.offset - identity.origin.time_since_epoch();
  *text += "{\"name\":";
  AppendJson(Title(event), text);
  text->append(",\"cat\":\"").append(CategoryOf(event)).append("\",\"ph\":\"");
  text->append(phase).append("\",\"ts\":");
  const bool at_end = phase == "e" || phase == "E";
  AppendTime((at_end ? event.end : event.begin).time_since_epoch() + to_trace, text);
  *text += ",\"pid\":";
  AppendNumber(ProcessOf(identity), text);
  *text += ",\"tid\":";
  AppendNumber(TrackNumber(event), text);
  if (phase == "X") {
    *text += ",\"dur\":";
    AppendTime(event.end - event.begin, text);
  } else if (phase == "i") {
    *text += R"(,"s":"t")";
  } else if (phase == "b" || phase == "e") {
    text->append(R"(,"id2":{"local":")").append(IdOf(event)).append("\"}");
  }
  *text += ",\"args\":";
  AppendArguments(event, text);
  *text += '}';
}

std::string NameLine(const TimelineIdentity& identity, std::string_view what, std::uint32_t track,
                     const std::string& name) {
  std::string line = "{\"name\":\"" + std::string(what) +
                     "\",\"ph\":\"M\",\"pid\":" + std::to_string(ProcessOf(identity)) +
                     ",\"tid\":" + std::to_string(track) + ",\"args\":{\"name\":";
  AppendJson(name, &line);
  return line + "}}";
}

// The first one: what reads several files tells runs apart by it.
std::string ProcessLine(const TimelineIdentity& identity) {
  const std::string rank = "rank " + std::to_string(identity.rank);
  std::string line = NameLine(identity, "process_name", 0,
                              identity.host.empty() ? rank : rank + " on " + identity.host);
  line.resize(line.size() - 2);
  line += ",\"session\":";
  AppendJson(identity.session, &line);
  // This rank's clock at time 0 of the trace, by which other traces of its host can be put beside it.
  line += ",\"host\":";
  AppendJson(identity.host, &line);
  line += ",\"zero\":";
  AppendNumber((identity.origin - identity.offset).time_since_epoch().count(), &line);
  return line + "}}";
}

std::string SortLine(const TimelineIdentity& identity) {
  return "{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":" +
         std::to_string(ProcessOf(identity)) +
         ",\"tid\":0,\"args\":{\"sort_index\":" + std::to_string(identity.rank) + "}}";
}

std::string TrackName(const Event& event) {
  switch (event.track) {
    case Track::kNegotiation:
      return "negotiation";
    case Track::kSmallLane:
      return "small lane";
    case Track::kLargeLane:
      return "large lane";
    case Track::kDevice:
      return "GPU " + std::to_string(event.thread);
    case Track::kPipeline:
      return event.thread == 1 ? "pipeline" : "pipeline of thread " + std::to_string(event.thread);
    case Track::kProgram:
      break;
  }
  return "thread " + std::to_string(event.thread);
}

void AppendLast(const TimelineIdentity& identity, TimePoint at, std::string* text) {
  *text += R"({"name":"the timeline is full: what comes after this is not in it",)"
           R"("cat":"lost","ph":"i","s":"p",)"
           "\"ts\":";
  AppendTime(at - identity.origin + identity.offset, text);
  *text += ",\"pid\":";
  AppendNumber(ProcessOf(identity), text);
  *text += ",\"tid\":0,\"args\":{}}";
}

}  // namespace

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
  named_.clear();
  begun_.clear();
  Add(ProcessLine(identity_), identity_.origin);
  Add(SortLine(identity_), identity_.origin);
  return Flush();
}

Status TimelineFile::Append(std::span<const Event> events) {
  for (const Event& event : events) {
    if (event.kind == EventKind::kBegin && !Begins(event)) continue;
    if (full_ || descriptor_ < 0) break;
    if (named_.insert(TrackNumber(event)).second) {
      Add(NameLine(identity_, "thread_name", TrackNumber(event), TrackName(event)), event.begin);
    }
    AppendPhases(event);
    Add(lines_, event.begin);
    if (text_.size() < kWriteBytes) continue;
    if (Status status = Flush(); !status.ok()) return status;
  }
  return Flush();
}

void TimelineFile::Add(std::string_view lines, TimePoint at) {
  if (full_) return;
  const auto size = static_cast<std::int64_t>(text_.size() + lines.size() + kLastBytes);
  full_ = max_bytes_ > 0 && end_ + size > max_bytes_;
  text_ += empty_ ? std::string_view("[\n") : kBetween;
  empty_ = false;
  if (full_) {
    AppendLast(identity_, at, &text_);
  } else {
    text_ += lines;
  }
}

void TimelineFile::AppendPhases(const Event& event) {
  const bool overlaps = Overlaps(event);
  const std::string_view begin = overlaps ? "b" : "B";
  const std::string_view end = overlaps ? "e" : "E";
  lines_.clear();
  if (Begins(event)) {
    if (begun_.size() >= kMostBegun) begun_.clear();  // of what has failed, in a run that goes on
    begun_.insert(IdOf(event));
    AppendLine(identity_, event, begin, &lines_);
  } else if (Ends(event) && begun_.erase(IdOf(event)) > 0) {
    AppendLine(identity_, event, end, &lines_);
  } else if (overlaps) {
    AppendLine(identity_, event, begin, &lines_);
    lines_ += kBetween;
    AppendLine(identity_, event, end, &lines_);
  } else {
    AppendLine(identity_, event, event.end != event.begin ? "X" : "i", &lines_);
  }
}

// The file is written from the closing bracket on: what stood before it stays.
Status TimelineFile::Flush() {
  if (text_.empty() || descriptor_ < 0) return Status::Ok();
  const std::int64_t begin = end_;
  end_ += static_cast<std::int64_t>(text_.size());
  text_ += kClosing;
  for (std::size_t done = 0; done < text_.size();) {
    const ssize_t written = pwrite(descriptor_, text_.data() + done, text_.size() - done,
                                   begin + static_cast<std::int64_t>(done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int why = errno;
      // Whole up to where it was; of the first write nothing is.
      if (ftruncate(descriptor_, begin) == 0 && begin > 0) {
        (void)!pwrite(descriptor_, kClosing.data(), kClosing.size(), begin);
      }
      Close();
      return {StatusCode::kBackend,
              "the timeline \"" + path_ + "\" cannot be written: " + std::strerror(why)};
    }
    done += static_cast<std::size_t>(written);
  }
  text_.clear();
  return Status::Ok();
}

void TimelineFile::Close() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
  text_.clear();
}

}  // namespace sirtaki::core::trace
