#include "launch/hosts/allocation.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "core/base/text.h"
#include "launch/base/shell_text.h"

namespace sirtaki::launch {

using core::Quoted;
using core::Status;
using core::StatusCode;

namespace {

constexpr std::size_t kMaxHosts = 65536;

Status Wrong(std::string_view from, std::string_view text, const std::string& why) {
  return {StatusCode::kInvalidArgument, std::string(from) + "=" + Quoted(text) + ": " + why};
}

// Pieces between commas that stand in no brackets; none if brackets do not match.
std::optional<std::vector<std::string_view>> SplitOutsideBrackets(std::string_view text) {
  std::vector<std::string_view> pieces;
  std::size_t begin = 0;
  bool inside = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '[' || text[i] == ']') {
      if (inside == (text[i] == '[')) return std::nullopt;
      inside = !inside;
    } else if (text[i] == ',' && !inside) {
      pieces.push_back(text.substr(begin, i - begin));
      begin = i + 1;
    }
  }
  if (inside) return std::nullopt;
  pieces.push_back(text.substr(begin));
  return pieces;
}

// "01-03,7" is 01, 02, 03, 7: as wide as the first number of a range is written.
std::optional<std::vector<std::string>> ExpandRanges(std::string_view text) {
  std::vector<std::string> numbers;
  for (const std::string_view range : Split(text, ',')) {
    const std::size_t dash = range.find('-');
    const std::string_view first = range.substr(0, dash);
    const std::string_view last = dash == std::string_view::npos ? first : range.substr(dash + 1);
    const auto from = NumberFrom<long>(first, 0, 1'000'000'000L);
    const auto to = NumberFrom<long>(last, 0, 1'000'000'000L);
    if (!from || !to || *to < *from) return std::nullopt;
    if (static_cast<std::size_t>(*to - *from) + numbers.size() >= kMaxHosts) return std::nullopt;
    for (long number = *from; number <= *to; ++number) {
      std::string digits = std::to_string(number);
      if (digits.size() < first.size()) digits.insert(0, first.size() - digits.size(), '0');
      numbers.push_back(std::move(digits));
    }
  }
  if (numbers.empty()) return std::nullopt;
  return numbers;
}

// One name with any number of brackets.
bool ExpandName(std::string_view name, std::vector<std::string>* out) {
  std::vector<std::string> names = {""};
  while (!name.empty()) {
    const std::size_t open = std::min(name.find('['), name.size());
    for (std::string& so_far : names) so_far += name.substr(0, open);
    if (open == name.size()) break;
    const std::size_t close = name.find(']', open);
    const auto numbers = ExpandRanges(name.substr(open + 1, close - open - 1));
    if (!numbers || names.size() * numbers->size() > kMaxHosts) return false;
    std::vector<std::string> longer;
    for (const std::string& so_far : names) {
      for (const std::string& number : *numbers) longer.push_back(so_far + number);
    }
    names = std::move(longer);
    name.remove_prefix(close + 1);
  }
  if (out->size() + names.size() > kMaxHosts) return false;
  out->insert(out->end(), names.begin(), names.end());
  return true;
}

Status FromSlurm(const core::EnvironmentView& env, Allocation* out) {
  const std::string nodes_name =
      env.Find("SLURM_JOB_NODELIST") ? "SLURM_JOB_NODELIST" : "SLURM_NODELIST";
  const auto nodes = env.Find(nodes_name);
  if (!nodes) {
    return {StatusCode::kInvalidArgument,
            "SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: the job's hosts are not known; "
            "name them with -H"};
  }
  std::vector<std::string> names;
  Status status = ExpandNodeList(*nodes, nodes_name, &names);
  if (!status.ok()) return status;
  std::vector<int> slots(names.size(), 1);
  // The slots are what the user asked for, else the processors.
  for (const char* name : {"SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"}) {
    const auto counts = env.Find(name);
    if (!counts) continue;
    std::vector<int> each;
    status = ExpandCounts(*counts, name, &each);
    if (!status.ok()) return status;
    if (each.size() != names.size()) {
      return Wrong(name, *counts,
                   "has " + std::to_string(each.size()) + " counts, but " + nodes_name + "=" +
                       Quoted(*nodes) + " has " + std::to_string(names.size()) + " hosts");
    }
    slots = std::move(each);
    break;
  }
  for (std::size_t i = 0; i < names.size(); ++i) AddSlots(names[i], slots[i], &out->hosts);
  out->system = BatchSystem::kSlurm;
  out->from = nodes_name;
  return Status::Ok();
}

Status FromPbs(const std::string& path, const core::FileReader& read, Allocation* out) {
  const auto text = read(path);
  if (!text) {
    return {StatusCode::kInvalidArgument,
            "PBS_NODEFILE=" + Quoted(path) + ": the file cannot be read; name the hosts with -H"};
  }
  Status status = ParseHostFile(*text, path, &out->hosts);
  out->system = BatchSystem::kPbs;
  out->from = "PBS_NODEFILE";
  return status;
}

Status FromLsf(const std::string& text, Allocation* out) {
  const std::vector<std::string_view> words = Words(text);
  if (words.empty() || words.size() % 2 != 0) {
    return Wrong("LSB_MCPU_HOSTS", text,
                 "expected pairs of a host and its slots, as in \"a 4 b 2\"");
  }
  for (std::size_t i = 0; i < words.size(); i += 2) {
    const auto slots = NumberFrom<int>(words[i + 1], 1, kMaxSlots);
    if (!slots) {
      return Wrong("LSB_MCPU_HOSTS", text, Quoted(words[i + 1]) + " is not a number of slots");
    }
    AddSlots(words[i], *slots, &out->hosts);
  }
  out->system = BatchSystem::kLsf;
  out->from = "LSB_MCPU_HOSTS";
  return Status::Ok();
}

}  // namespace

Status FindAllocation(const core::EnvironmentView& env, const core::FileReader& read,
                      Allocation* out) {
  Allocation found;
  Status status;
  if (env.Find("SLURM_JOB_ID")) {
    status = FromSlurm(env, &found);
  } else if (const auto path = env.Find("PBS_NODEFILE")) {
    status = FromPbs(*path, read, &found);
  } else if (const auto text = env.Find("LSB_MCPU_HOSTS")) {
    status = FromLsf(*text, &found);
  }
  if (status.ok()) *out = std::move(found);
  return status;
}

Status ExpandNodeList(std::string_view text, std::string_view from, std::vector<std::string>* out) {
  std::vector<std::string> names;
  const auto parts = SplitOutsideBrackets(text);
  bool ok = parts.has_value();
  for (std::size_t i = 0; ok && i < parts->size(); ++i) {
    ok = !(*parts)[i].empty() && ExpandName((*parts)[i], &names);
  }
  if (!ok) {
    return Wrong(from, text,
                 "is not a list of hosts as in \"node[01-03,7],gpu1\", of at most " +
                     std::to_string(kMaxHosts));
  }
  *out = std::move(names);
  return Status::Ok();
}

Status ExpandCounts(std::string_view text, std::string_view from, std::vector<int>* out) {
  std::vector<int> counts;
  Status wrong = Wrong(from, text, "is not a list of counts as in \"4(x2),1\"");
  for (const std::string_view part : Split(text, ',')) {
    const std::size_t open = part.find("(x");
    const auto count = NumberFrom<int>(part.substr(0, open), 1, kMaxSlots);
    std::optional<std::size_t> times = 1;
    if (open != std::string_view::npos) {
      if (part.back() != ')') return wrong;
      times = NumberFrom<std::size_t>(part.substr(open + 2, part.size() - open - 3), 1, kMaxHosts);
    }
    if (!count || !times || counts.size() + *times > kMaxHosts) return wrong;
    counts.insert(counts.end(), *times, *count);
  }
  if (counts.empty()) return wrong;
  *out = std::move(counts);
  return Status::Ok();
}

}  // namespace sirtaki::launch
