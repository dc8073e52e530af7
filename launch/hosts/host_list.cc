#include "launch/hosts/host_list.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <utility>

#include "core/base/spelling.h"
#include "core/base/text.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

using core::Quoted;
using core::Status;
using core::StatusCode;

namespace {

Status Wrong(const std::string& from, const std::string& text) {
  return {StatusCode::kInvalidArgument, from + ": " + text};
}

bool IsHostName(std::string_view name) {
  return !name.empty() && name.front() != '-' &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '.' || c == '-' || c == '_';
         });
}

Status CheckHostName(std::string_view name, const std::string& from) {
  if (IsHostName(name)) return Status::Ok();
  return Wrong(from, Quoted(name) +
                         " is not a host's name; allowed are letters, digits, dots, dashes and "
                         "underscores");
}

Status ReadSlots(std::string_view text, const std::string& from, int* slots) {
  const auto number = NumberFrom<int>(text, 1, kMaxSlots);
  if (!number) {
    return Wrong(from, Quoted(text) + " is not a number of slots; allowed is 1 to " +
                           std::to_string(kMaxSlots));
  }
  *slots = *number;
  return Status::Ok();
}

// "a" or "a:4"
Status ReadHost(std::string_view text, const std::string& from, std::string_view* name,
                int* slots) {
  const std::size_t colon = text.find(':');
  *name = text.substr(0, colon);
  *slots = 1;
  Status status = CheckHostName(*name, from);
  if (!status.ok() || colon == std::string_view::npos) return status;
  return ReadSlots(text.substr(colon + 1), from, slots);
}

// "slots = 4", which Open MPI allows, becomes "slots=4".
std::string WithoutSpacesAroundSigns(std::string_view line) {
  std::string joined;
  for (const char c : line) {
    const bool is_space = std::isspace(static_cast<unsigned char>(c)) != 0;
    if (is_space && joined.ends_with('=')) continue;
    if (c == '=') joined.erase(joined.find_last_not_of(" \t") + 1);
    joined += c;
  }
  return joined;
}

Status ReadLine(std::string_view line, const std::string& from, HostList* hosts) {
  const std::string joined = WithoutSpacesAroundSigns(line.substr(0, line.find('#')));
  std::vector<std::string_view> words = Words(joined);
  // More than these slots no program of ours takes of a host.
  std::erase_if(words, [](std::string_view word) {
    return word.starts_with("max-slots=") || word.starts_with("max_slots=");
  });
  if (words.empty()) return Status::Ok();
  std::string_view name;
  int slots = 1;
  Status status = ReadHost(words[0], from, &name, &slots);
  for (std::size_t i = 1; i < words.size() && status.ok(); ++i) {
    constexpr std::string_view kSlots = "slots=";
    if (!words[i].starts_with(kSlots)) {
      return Wrong(from, Quoted(words[i]) +
                             " is not understood; a line is \"host slots=4\", "
                             "\"host:4\" or \"host\"");
    }
    if (i > 1 || words[0].find(':') != std::string_view::npos) {
      return Wrong(from, "the slots of " + Quoted(name) + " are given twice");
    }
    status = ReadSlots(words[i].substr(kSlots.size()), from, &slots);
  }
  if (status.ok()) AddSlots(name, slots, hosts);
  return status;
}

// Which slots of a host a filter names.
using Selection = std::vector<std::pair<const Host*, std::vector<int>>>;

Status FindHost(std::string_view name, const std::string& from, const HostList& hosts,
                const Host** found) {
  const auto it =
      std::find_if(hosts.begin(), hosts.end(), [&](const Host& host) { return host.name == name; });
  if (it != hosts.end()) {
    *found = &*it;
    return Status::Ok();
  }
  std::vector<std::string> known;
  for (const Host& host : hosts) known.push_back(host.name);
  std::string text = "host " + Quoted(name) + " is not among the hosts";
  const std::string nearest = core::NearestWord(name, known);
  if (!nearest.empty()) text += "; the nearest is " + Quoted(nearest);
  return Wrong(from, text + "; there are " + HostsText(hosts));
}

Status ReadSelection(std::string_view text, const std::string& from, const HostList& hosts,
                     Selection* selection) {
  for (const std::string_view part : Split(text, '@')) {
    const std::size_t colon = part.find(':');
    const Host* host = nullptr;
    Status status = FindHost(part.substr(0, colon), from, hosts, &host);
    if (!status.ok()) return status;
    std::vector<int> slots;
    if (colon == std::string_view::npos) {
      slots.resize(static_cast<std::size_t>(host->slots));
      std::iota(slots.begin(), slots.end(), 0);
    } else {
      for (const std::string_view word : Split(part.substr(colon + 1), ',')) {
        const auto slot = NumberFrom<int>(word, 0, host->slots - 1);
        if (!slot) {
          return Wrong(from, Quoted(word) + " is not a slot of host " + Quoted(host->name) +
                                 ", which has 0 to " + std::to_string(host->slots - 1));
        }
        slots.push_back(*slot);
      }
      if (slots.empty()) return Wrong(from, "no slot follows \"" + host->name + ":\"");
    }
    selection->emplace_back(host, slots);
  }
  if (selection->empty()) return Wrong(from, "names no host");
  return Status::Ok();
}

}  // namespace

int SlotsOf(const HostList& hosts) {
  return std::accumulate(hosts.begin(), hosts.end(), 0,
                         [](int sum, const Host& host) { return sum + host.slots; });
}

std::string DevicesText(const Host& host) {
  std::string text;
  for (const int device : host.devices) text += (text.empty() ? "" : ",") + std::to_string(device);
  return text;
}

Status ChooseDevices(std::string_view numbers, const std::string& visible, std::string* out) {
  const std::vector<std::string_view> all = Split(visible, ',');
  const bool shows_none =
      visible.empty() || all[0] == "-1" || all[0] == "NoDevFiles";  // Slurm's word
  std::vector<std::string> chosen;
  for (const std::string_view number : Split(numbers, ',')) {
    const auto at = NumberFrom<std::size_t>(number, 0, kMaxSlots);
    if (shows_none || !at) continue;
    if (*at >= all.size()) {
      return {StatusCode::kInvalidArgument,
              "slot " + std::string(number) + " is to be used, but CUDA_VISIBLE_DEVICES=" +
                  visible + " names only " + CountText(all.size(), "GPU") + " there"};
    }
    chosen.emplace_back(all[*at]);
  }
  *out = shows_none ? visible : Joined(chosen, ",");
  return Status::Ok();
}

std::string HostsText(const HostList& hosts) {
  std::vector<std::string> parts;
  for (const Host& host : hosts) parts.push_back(host.name + ":" + std::to_string(host.slots));
  return Joined(parts, ",");
}

void AddSlots(std::string_view name, int slots, HostList* hosts) {
  const auto it = std::find_if(hosts->begin(), hosts->end(),
                               [&](const Host& host) { return host.name == name; });
  if (it != hosts->end()) {
    it->slots = std::min(kMaxSlots, it->slots + slots);
  } else {
    hosts->push_back({std::string(name), slots, {}});
  }
}

Status ParseHosts(std::string_view text, std::string_view from, HostList* out) {
  HostList hosts;
  for (const std::string_view part : Split(text, ',')) {
    std::string_view name;
    int slots = 1;
    Status status = ReadHost(part, std::string(from), &name, &slots);
    if (!status.ok()) return status;
    AddSlots(name, slots, &hosts);
  }
  if (hosts.empty()) return Wrong(std::string(from), "names no host; expected hosts as in a:4,b:4");
  *out = std::move(hosts);
  return Status::Ok();
}

Status ParseHostFile(std::string_view text, std::string_view path, HostList* out) {
  HostList hosts;
  int number = 0;
  for (const std::string_view line : Split(text, '\n')) {
    const std::string from = Quoted(path) + ", line " + std::to_string(++number);
    Status status = ReadLine(line, from, &hosts);
    if (!status.ok()) return status;
  }
  if (hosts.empty()) return Wrong(Quoted(path), "names no host");
  *out = std::move(hosts);
  return Status::Ok();
}

Status FilterHosts(std::string_view text, bool include, std::string_view from, HostList* hosts) {
  Selection selection;
  Status status = ReadSelection(text, std::string(from), *hosts, &selection);
  if (!status.ok()) return status;
  HostList left;
  for (const Host& host : *hosts) {
    std::vector<bool> named(static_cast<std::size_t>(host.slots), false);
    for (const auto& [of, slots] : selection) {
      if (of != &host) continue;
      for (const int slot : slots) named[static_cast<std::size_t>(slot)] = true;
    }
    Host kept{host.name, 0, {}};
    for (int slot = 0; slot < host.slots; ++slot) {
      if (named[static_cast<std::size_t>(slot)] != include) continue;
      ++kept.slots;
      kept.devices.push_back(slot);
    }
    if (kept.slots == host.slots) kept.devices.clear();
    if (kept.slots > 0) left.push_back(std::move(kept));
  }
  if (left.empty()) return Wrong(std::string(from), "leaves no slot of " + HostsText(*hosts));
  *hosts = std::move(left);
  return Status::Ok();
}

}  // namespace sirtaki::launch
