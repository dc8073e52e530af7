#include "launch/reports/generations.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/rank_ranges.h"
#include "core/base/text.h"
#include "core/base/words.h"

namespace sirtaki::launch {
namespace {

using core::Status;
using core::TimePoint;
using NoteKind = GenerationNote::Kind;

// A person reads no more than this.
constexpr std::size_t kMostGenerations = 20;

constexpr std::pair<NoteKind, const char*> kKinds[] = {
    {NoteKind::kDecided, "decided"}, {NoteKind::kJoined, "joined"}, {NoteKind::kTrains, "trains"},
    {NoteKind::kLeft, "left"},       {NoteKind::kOver, "over"},     {NoteKind::kEnded, "ended"}};

std::int64_t Nanoseconds(TimePoint at) {
  return std::chrono::nanoseconds(at.time_since_epoch()).count();
}

void Take(GenerationNote note, Generation* generation) {
  generation->number = note.generation;
  switch (note.kind) {
    case NoteKind::kDecided:
      generation->decided = note.at;
      generation->host = note.host;
      for (std::size_t i = 0; i < std::min(note.workers.size(), note.on.size()); ++i) {
        generation->members.push_back({note.workers[i], note.on[i]});
      }
      return;
    case NoteKind::kJoined:
      generation->joined = note.at;
      return;
    case NoteKind::kTrains:
      generation->trains = note.at;
      return;
    case NoteKind::kLeft:
      generation->left.push_back(std::move(note));
      return;
    case NoteKind::kEnded:
      if (generation->over) return;
      [[fallthrough]];
    case NoteKind::kOver:
      generation->over = note.at;
      generation->why_over = std::move(note.text);
      return;
  }
}

std::string OneText(const Generation& generation, const Generation* before) {
  std::string text = "  " + std::to_string(generation.number) + ": " +
                     core::Escaped(MembersText(generation.members));
  const auto parts = [&](const std::string& begin, std::optional<TimePoint> from,
                         const std::string& first) {
    std::string told;
    const auto add = [&](std::optional<TimePoint> since, std::optional<TimePoint> until,
                         const std::string& what) {
      if (!since || !until) return;
      told += (told.empty() ? "" : ", ") + core::DurationText(*until - *since) + " " + what;
    };
    if (!first.empty()) add(from, generation.decided, first);
    add(generation.decided, generation.joined, "to join");
    add(generation.joined, generation.trains, "to get the state");
    return told.empty() ? told : begin + told;
  };
  if (before != nullptr && before->over && generation.joined) {
    text += "; it began " + core::DurationText(*generation.joined - *before->over) +
            " after the one before" + parts(": ", before->over, "to leave that");
  } else {
    text += parts("; it took ", std::nullopt, "");
  }
  if (generation.over) {
    const auto since = generation.trains ? generation.trains : generation.joined;
    text += since ? "; over " + core::DurationText(*generation.over - *since) + " later: "
                  : std::string("; over before it had begun: ");
    text += core::Escaped(generation.why_over);
  }
  text += "\n";
  for (const GenerationNote& note : generation.left) {
    const std::string name = NameOf(note.workers.empty() ? -1 : note.workers.front(), note.host);
    const std::string how = core::Escaped(note.text);
    // The line before may have said so, without "is lost: ".
    const std::string over = core::Escaped(generation.why_over);
    const std::string begin = name + ": ";
    if (over.starts_with(begin) && how.ends_with(over.substr(begin.size()))) continue;
    text += "     " + name + " " + how + "\n";
  }
  return text;
}

}  // namespace

std::string ToLine(const GenerationNote& note) {
  nlohmann::ordered_json line;
  for (const auto& [kind, name] : kKinds) {
    if (kind == note.kind) line["event"] = name;
  }
  line["generation"] = note.generation;
  line["at"] = Nanoseconds(note.at);
  line["host"] = note.host;
  if (!note.workers.empty()) line["workers"] = note.workers;
  if (!note.on.empty()) line["on"] = note.on;
  if (!note.text.empty()) line["text"] = note.text;
  return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::optional<GenerationNote> NoteFrom(std::string_view text) {
  const auto line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object()) return std::nullopt;
  try {
    GenerationNote note;
    const auto event = line.at("event").get<std::string>();
    const auto* const kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                          [&](const auto& one) { return event == one.second; });
    if (kind == std::end(kKinds)) return std::nullopt;
    note.kind = kind->first;
    note.generation = line.at("generation").get<int>();
    note.at = TimePoint(std::chrono::nanoseconds(line.at("at").get<std::int64_t>()));
    note.host = line.at("host").get<std::string>();
    note.workers = line.value("workers", std::vector<int>());
    note.on = line.value("on", std::vector<std::string>());
    note.text = line.value("text", std::string());
    return note;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

Status ReadGenerations(const std::string& folder, std::vector<Generation>* generations) {
  const std::string path = folder + "/" + std::string(kGenerationsFile);
  std::error_code none;
  if (!std::filesystem::exists(path, none)) return Status::Ok();
  std::ifstream file(path, std::ios::binary);
  if (!file) return {core::StatusCode::kInvalidArgument, path + ": " + std::strerror(errno)};
  std::map<int, Generation> found;
  for (std::string line; std::getline(file, line);) {
    if (auto note = NoteFrom(line)) Take(*note, &found[note->generation]);
  }
  for (auto& [number, generation] : found) {
    if (number > 0) generations->push_back(std::move(generation));
  }
  return Status::Ok();
}

std::string NameOf(int worker, const std::string& host) {
  return "worker " + std::to_string(worker) + " on host " + core::Escaped(host);
}

std::string MembersText(const std::vector<Generation::Member>& members) {
  std::string text = core::CountText(members.size(), "rank") + ": workers ";
  for (auto at = members.begin(); at != members.end();) {
    const std::string& host = at->host;
    core::RankRanges here;
    for (; at != members.end() && at->host == host; ++at) here.Add(at->worker);
    text += here.ToString() + " on host " + host + (at == members.end() ? "" : ", ");
  }
  return text;
}

std::string GenerationsText(const std::vector<Generation>& generations) {
  if (generations.empty()) return {};
  std::string text = "The elastic job has had " + core::CountText(generations.size(), "generation");
  const std::size_t first = generations.size() > kMostGenerations
                                ? generations.size() - kMostGenerations
                                : std::size_t{0};
  text += first > 0 ? ", the last " + std::to_string(kMostGenerations) + " of them:\n" : ":\n";
  for (std::size_t i = first; i < generations.size(); ++i) {
    text += OneText(generations[i], i > 0 ? &generations[i - 1] : nullptr);
  }
  return text;
}

}  // namespace sirtaki::launch
