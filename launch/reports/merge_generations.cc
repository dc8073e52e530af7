#include "launch/reports/merge_generations.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "core/trace/trace_files.h"

namespace sirtaki::launch {
namespace {

using core::Duration;
using core::TimePoint;
using nlohmann::ordered_json;

// Tracks of sirtakirun.
constexpr int kGenerationsTrack = 1;
constexpr int kChangesTrack = 2;

// Viewers treat process 0 as none.
int ProcessOf(int worker) { return worker + 1; }

// Writes the events of sirtakirun's own two tracks.
class SirtakirunTracks {
 public:
  SirtakirunTracks(int process, TimePoint zero, std::vector<std::string>* objects)
      : process_(process), zero_(zero), objects_(objects) {
    Name("process_name", 0, "name", "sirtakirun");
    Name("process_sort_index", 0, "sort_index", -1);
    Name("thread_name", kGenerationsTrack, "name", "generations");
    Name("thread_name", kChangesTrack, "name", "changes");
  }

  void Bar(int track, const std::string& name, std::optional<TimePoint> from,
           std::optional<TimePoint> until) {
    if (!from || !until || *until < *from) return;
    ordered_json object = Event(track, name, "X", *from);
    object["dur"] = Microseconds(*until - *from);
    Add(object);
  }
  // The bar has no known end.
  void Open(int track, const std::string& name, std::optional<TimePoint> from) {
    if (from) Add(Event(track, name, "B", *from));
  }
  void Instant(int track, const std::string& name, TimePoint at) {
    ordered_json object = Event(track, name, "i", at);
    object["s"] = "p";
    Add(object);
  }

 private:
  template <class Value>
  void Name(const char* what, int track, const char* key, const Value& value) {
    Add({{"name", what}, {"ph", "M"}, {"pid", process_}, {"tid", track}, {"args", {{key, value}}}});
  }
  ordered_json Event(int track, const std::string& name, const char* phase, TimePoint at) const {
    return {{"name", name},
            {"cat", "elastic"},
            {"ph", phase},
            {"ts", Microseconds(at - zero_)},
            {"pid", process_},
            {"tid", track},
            {"args", ordered_json::object()}};
  }
  void Add(const ordered_json& object) {
    objects_->push_back(object.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
  }

  const int process_;
  const TimePoint zero_;
  std::vector<std::string>* const objects_;
};

void Tell(const Generation& generation, const Generation* before, SirtakirunTracks* to) {
  const std::string title =
      "generation " + std::to_string(generation.number) + ": " + MembersText(generation.members);
  if (generation.over) {
    to->Bar(kGenerationsTrack, title, generation.joined, generation.over);
  } else {
    to->Open(kGenerationsTrack, title, generation.joined);
  }
  for (const GenerationNote& note : generation.left) {
    const int worker = note.workers.empty() ? -1 : note.workers.front();
    to->Instant(kChangesTrack, NameOf(worker, note.host) + " " + note.text, note.at);
  }
  const auto since = before != nullptr ? before->over : generation.decided;
  const auto until = generation.trains ? generation.trains : generation.joined;
  to->Bar(kChangesTrack, before != nullptr ? before->why_over : "the job begins", since, until);
  if (before != nullptr) to->Bar(kChangesTrack, "leave", since, generation.decided);
  to->Bar(kChangesTrack, "join", generation.decided, generation.joined);
  to->Bar(kChangesTrack, "get the state", generation.joined, generation.trains);
}

}  // namespace

GenerationsTimeline TimelineOf(const std::string& folder,
                               const std::vector<Generation>& generations,
                               std::vector<std::string>* notes) {
  GenerationsTimeline timeline;
  const auto first =
      std::ranges::find_if(generations, [](const auto& one) { return one.decided.has_value(); });
  if (first == generations.end()) return timeline;
  const TimePoint zero = *first->decided;
  int last_worker = 0;
  std::set<int> workers;
  for (const Generation& generation : generations) {
    const std::string option = core::trace::TimelineOfGeneration(folder, generation.number);
    std::vector<TimelinePart> parts;
    std::optional<std::string> run;
    // A rank on sirtakirun's host has its clock; else rank 0 began soon after sirtakirun had decided.
    std::optional<TimePoint> begins;
    for (std::size_t rank = 0; rank < generation.members.size(); ++rank) {
      const Generation::Member& member = generation.members[rank];
      last_worker = std::max(last_worker, member.worker);
      const std::string path = core::trace::TimelinePath(option, static_cast<int>(rank));
      const auto head = HeadOf(path);
      if (!head) continue;  // it has ended before it began to write
      if (!run) run = head->session;
      if (head->session != run) {
        notes->push_back(path + " was left out: it belongs to another run");
        continue;
      }
      if (head->host == generation.host && !begins) begins = head->zero;
      workers.insert(member.worker);
      parts.push_back({.path = path,
                       .process = ProcessOf(member.worker),
                       .title = "worker " + std::to_string(member.worker) + " on " + member.host});
    }
    if (!begins) begins = generation.decided;
    for (TimelinePart& part : parts) {
      if (begins) part.later = *begins - zero;
      timeline.parts.push_back(std::move(part));
    }
  }
  SirtakirunTracks tracks(ProcessOf(last_worker + 1), zero, &timeline.objects);
  const Generation* before = nullptr;
  for (const Generation& generation : generations) {
    Tell(generation, before, &tracks);
    before = &generation;
  }
  timeline.workers = static_cast<int>(workers.size());
  return timeline;
}

}  // namespace sirtaki::launch
