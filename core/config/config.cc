#include "core/config/config.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <string_view>

#include "core/base/byte_codec.h"
#include "core/base/check.h"
#include "core/base/digest.h"
#include "core/base/rank_ranges.h"
#include "core/base/spelling.h"
#include "core/base/text.h"
#include "core/config/config_table.h"

namespace sirtaki::core {
namespace {

constexpr std::string_view kFlagPrefix = "--sirtaki-";
constexpr std::string_view kVariablePrefix = "SIRTAKI_";
constexpr std::size_t kMaxText = 4096;  // of a value that is told to other ranks

void SetOption(const OptionSpec& option, std::int64_t value, OptionSource source, Config* config) {
  option.set(*config, value);
  config->SetSource(option.name, source);
}

// Names the known option that was most likely meant; empty if none is near. `given` begins with
// `prefix`, as all of its kind do.
template <typename Spelling>
std::string NearestOption(std::string_view prefix, const std::string& given, Spelling spelling) {
  std::vector<std::string> known;
  for (const OptionSpec& option : OptionTable()) known.emplace_back(std::invoke(spelling, option));
  return NearestText(given, known, prefix.size());
}

Status UnknownOption(const std::string& what, const std::string& given,
                     const std::string& nearest) {
  return {StatusCode::kInvalidArgument, "unknown " + what + " " + Escaped(given) + nearest +
                                            " (docs/configuration.md lists all)"};
}

Status UnknownName(const std::string& given) {
  return UnknownOption("option", given, NearestOption("", given, &OptionSpec::name));
}

Status BadValue(const OptionSpec& option, std::string_view text, const std::string& from,
                const std::string& allowed) {
  return {StatusCode::kInvalidArgument, "option " + std::string(option.name) + " cannot be " +
                                            Quoted(text) + " (from " + from + "); allowed is " +
                                            allowed};
}

Status SetFromText(const OptionSpec& option, std::string_view text, OptionSource source,
                   const std::string& from, Config* config) {
  if (!SetOptionFromText(option, text, config)) {
    return BadValue(option, text, from, AllowedValues(option));
  }
  config->SetSource(option.name, source);
  return Status::Ok();
}

// The option that has this variable or flag; null if there is none.
const OptionSpec* OptionSpelt(std::string (OptionSpec::*spelling)() const,
                              const std::string& text) {
  const auto table = OptionTable();
  const auto option = std::ranges::find(table, text, spelling);
  return option == table.end() ? nullptr : &*option;
}

Status ReadVariables(const EnvironmentView& env, Config* config) {
  for (const std::string& name : env.NamesWithPrefix(kVariablePrefix)) {
    if (IsForeignVariable(name)) continue;
    const OptionSpec* option = OptionSpelt(&OptionSpec::Variable, name);
    if (option == nullptr) {
      // Somebody else's variable may begin as ours do: only what looks misspelt stops a rank.
      const std::string nearest = NearestOption(kVariablePrefix, name, &OptionSpec::Variable);
      if (!nearest.empty()) return UnknownOption("environment variable", name, nearest);
      continue;
    }
    Status status = SetFromText(*option, *env.Find(name), OptionSource::kVariable, name, config);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status ReadFlag(const std::string& argument, Config* config) {
  const std::size_t equals = argument.find('=');
  const std::string flag = argument.substr(0, equals);
  const OptionSpec* const option = OptionSpelt(&OptionSpec::Flag, flag);
  if (option == nullptr) {
    return UnknownOption("flag", flag, NearestOption(kFlagPrefix, flag, &OptionSpec::Flag));
  }
  if (equals != std::string::npos) {
    return SetFromText(*option, argument.substr(equals + 1), OptionSource::kFlag, flag, config);
  }
  if (option->kind == OptionKind::kBool) {
    SetOption(*option, 1, OptionSource::kFlag, config);
    return Status::Ok();
  }
  return {StatusCode::kInvalidArgument, "flag " + flag + " needs a value, as " + flag +
                                            "=VALUE; allowed is " + AllowedValues(*option)};
}

Status ReadFlags(const std::vector<std::string>& args, Config* config, std::vector<bool>* ours) {
  for (std::size_t i = 0; i < args.size(); ++i) {
    if (args[i] == "--") break;  // by custom, what follows is no flag
    if (!args[i].starts_with(kFlagPrefix)) continue;
    (*ours)[i] = true;
    Status status = ReadFlag(args[i], config);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status ReadProgram(const ProgramOptions& program, Config* config) {
  for (const auto& [name, value] : program) {
    const OptionSpec* option = FindOption(name);
    if (option == nullptr) return UnknownName(name);
    Status status = SetFromText(*option, value, OptionSource::kProgram, "the program", config);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

// Horovod's count only where nothing of ours was said: what is overruled need not be right.
Status ReadHorovod(const EnvironmentView& env, Config* config) {
  for (const HorovodAlias& alias : HorovodAliases()) {
    const auto text = alias.variable.empty() ? std::nullopt : env.Find(alias.variable);
    if (!text || config->IsExplicit(alias.option)) continue;
    const OptionSpec& option = *FindOption(alias.option);
    const std::string from(alias.variable);
    if (alias.IsSwitch() && !ParseBool(*text)) return BadValue(option, *text, from, "0 or 1");
    const auto meaning = MeaningOf(alias, *text);
    if (!meaning) continue;
    Status status = SetFromText(option, *meaning, OptionSource::kHorovod, from, config);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

// The file comes last: its lines count only where nothing else was said.
Status ReadSettings(Config* config) {
  const std::string& path = config->settings;
  std::ifstream file(path);
  const auto wrong = [&path](int number, const std::string& text) {
    return Status(StatusCode::kInvalidArgument,
                  "the file of the option settings, " + Quoted(path) +
                      (number > 0 ? ", line " + std::to_string(number) : "") + ": " + text);
  };
  if (!file) return wrong(0, "it cannot be read");
  const auto given = config->sources;  // before the file, whose later lines win over earlier ones
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const std::string_view said = Trimmed(std::string_view(line).substr(0, line.find('#')));
    if (said.empty()) continue;
    const std::size_t colon = said.find(':');
    if (colon == std::string_view::npos) return wrong(number, "expected \"option: value\"");
    const std::string name(Trimmed(said.substr(0, colon)));
    const OptionSpec* option = FindOption(name);
    if (option == nullptr || option->name == "settings") {
      return wrong(number, UnknownName(name).message());
    }
    if (given.contains(option->name)) continue;
    const Status status = SetFromText(*option, Trimmed(said.substr(colon + 1)), OptionSource::kFile,
                                      Quoted(path), config);
    if (!status.ok()) return wrong(number, status.message());
  }
  return file.eof() && !file.bad() ? Status::Ok() : wrong(0, "it cannot be read");
}

std::string SourceText(const OptionSpec& option, OptionSource source) {
  switch (source) {
    case OptionSource::kDefault:
      return "the default";
    case OptionSource::kHorovod: {
      std::string text = "from";
      for (const HorovodAlias& alias : HorovodAliases()) {
        if (alias.option != option.name || alias.variable.empty()) continue;
        text.append(text == "from" ? " " : " or ").append(alias.variable);
      }
      return text;
    }
    case OptionSource::kFile:
      return "from the file of the option settings";
    case OptionSource::kVariable:
      return "from " + option.Variable();
    case OptionSource::kFlag:
      return "from " + option.Flag();
    case OptionSource::kProgram:
      return "from the program";
  }
  return "from somewhere";
}

std::string ValueWithSource(const OptionSpec& option, const Config& config) {
  return OptionText(option, config) + " (" + SourceText(option, config.SourceOf(option.name)) + ")";
}

// Tells versions with other options apart.
std::uint64_t TableFingerprint() {
  std::string names;
  for (const OptionSpec& option : OptionTable()) names.append(option.name).append("\n");
  return Digest(names.data(), names.size());
}

}  // namespace

Status ParseConfig(const std::vector<std::string>& args, const EnvironmentView& env,
                   const ProgramOptions& program, Config* out, std::vector<bool>* ours) {
  Config config;
  std::vector<bool> read(args.size());
  // The sources follow from the weakest to the strongest: each overwrites what came before.
  Status status = ReadVariables(env, &config);
  if (status.ok()) status = ReadFlags(args, &config, &read);
  if (status.ok()) status = ReadProgram(program, &config);
  if (status.ok()) status = ReadHorovod(env, &config);
  if (status.ok() && !config.settings.empty()) status = ReadSettings(&config);
  if (!status.ok()) return status;
  *out = config;
  if (ours != nullptr) *ours = std::move(read);
  return status;
}

std::string UnknownVariablesWarning(const EnvironmentView& env) {
  std::string names;
  int count = 0;
  for (const std::string& name : env.NamesWithPrefix(kVariablePrefix)) {
    if (IsForeignVariable(name) || OptionSpelt(&OptionSpec::Variable, name) != nullptr) continue;
    names += (count++ == 0 ? "" : ", ") + Escaped(name);
  }
  if (count == 0) return {};
  return "the environment variable" + std::string(count == 1 ? " " : "s ") + names +
         (count == 1 ? " is no option of Sirtaki and changes nothing"
                     : " are no options of Sirtaki and change nothing") +
         " (docs/configuration.md lists all)";
}

Status AgreeConfigs(std::span<const Config> by_rank, Config* agreed) {
  SIRTAKI_CHECK(!by_rank.empty(), "there is at least one rank");
  const Config& first = by_rank.front();
  for (const OptionSpec& option : OptionTable()) {
    if (!option.agreed) continue;
    const std::int64_t value = option.get(first);
    const Config* other = nullptr;
    RankRanges ranks;  // those that ask for the same as the first one that differs
    for (std::size_t rank = 1; rank < by_rank.size(); ++rank) {
      const Config& config = by_rank[rank];
      if (!config.IsExplicit(option.name) || option.get(config) == value) continue;
      if (other == nullptr) other = &config;
      if (option.get(config) == option.get(*other)) ranks.Add(static_cast<int>(rank));
    }
    if (other != nullptr) {
      return {StatusCode::kMismatch,
              "option " + std::string(option.name) + " must be the same on all ranks: rank 0 has " +
                  ValueWithSource(option, first) + ", " +
                  (ranks.Count() == 1 ? "rank " : "ranks ") + ranks.ToString() +
                  (ranks.Count() == 1 ? " has " : " have ") + ValueWithSource(option, *other)};
    }
  }
  for (const OptionSpec& option : OptionTable()) {
    if (option.agreed) SetOption(option, option.get(first), first.SourceOf(option.name), agreed);
  }
  return Status::Ok();
}

// config := fixed64 fingerprint of the table, then for each option: [source] zigzag value, or text
std::string SerializeConfig(const Config& config) {
  ByteWriter writer;
  writer.Fixed64(TableFingerprint());
  for (const OptionSpec& option : OptionTable()) {
    writer.Byte(static_cast<std::uint8_t>(config.SourceOf(option.name)));
    if (option.kind == OptionKind::kText) {
      writer.Text(std::string_view(config.*option.text).substr(0, kMaxText));
    } else {
      writer.Zigzag(option.get(config));
    }
  }
  return std::string(writer.text());
}

Status DeserializeConfig(std::string_view bytes, Config* config) {
  ByteReader reader(bytes);
  if (reader.Fixed64("option table") != TableFingerprint() && reader.ok()) {
    return {StatusCode::kProtocol,
            "the ranks run versions of Sirtaki whose options differ: use one version everywhere"};
  }
  Config result;
  constexpr auto kLastSource = static_cast<std::uint8_t>(OptionSource::kProgram);
  for (const OptionSpec& option : OptionTable()) {
    const std::uint8_t source = reader.ByteUpTo("option source", kLastSource);
    if (option.kind == OptionKind::kText) {
      result.*option.text = reader.Text("option value", kMaxText);
      result.SetSource(option.name, static_cast<OptionSource>(source));
      continue;
    }
    const std::int64_t value = reader.Zigzag("option value");
    if (!IsAllowedValue(option, value)) reader.Fail("option value", "is not allowed");
    if (!reader.ok()) return reader.status();
    SetOption(option, value, static_cast<OptionSource>(source), &result);
  }
  reader.ExpectEnd();
  if (reader.ok()) *config = result;
  return reader.status();
}

std::string DescribeConfig(const Config& config) {
  std::string text;
  for (const OptionSpec& option : OptionTable()) {
    if (!config.IsExplicit(option.name)) continue;
    text.append(text.empty() ? "" : ", ").append(option.name).append("=");
    text += ValueWithSource(option, config);
  }
  return text.empty() ? "defaults" : text;
}

}  // namespace sirtaki::core
