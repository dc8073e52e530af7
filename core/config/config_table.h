// The table of options, and the texts of their values. Used by what goes through all options:
// the parser, the page, sirtakirun, autotune and tests. The rest reads the fields of Config.
//
// Each value is an integer inside: bytes, a count, microseconds, 0 or 1, or a choice's index.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/config/config.h"

namespace sirtaki::core {

enum class OptionKind : std::uint8_t {
  kBytes,        // "64M": K, M, G are powers of 1024
  kCount,        // "8"
  kAutoOrCount,  // "auto" is 0
  kDuration,     // "60", "2s", "500ms", "100us", "30min"; without a unit, seconds
  kBool,         // "true", "false", and the usual others
  kChoice,       // one of a few words
  kText,         // as it stands; each rank's own
};

// An alias is what Horovod calls an option: a variable, a flag of its launcher, or both.
struct HorovodAlias {
  // How a value is read, if it is not a switch.
  enum class Reading : std::uint8_t {
    kSame,
    kMebibytes,
    kRaisedToMin,  // Horovod allows 0: it becomes our least
    kNotDynamic,   // Horovod's "DYNAMIC" is none yet: the program gives one later
  };
  std::string_view option;
  std::string_view variable;
  std::string_view flag;   // without dashes
  std::string_view value;  // stands for the flag's value in the help; empty: a switch
  Reading reading = Reading::kSame;
  // Our values for a switch that is on or off; empty: it says nothing then.
  std::string_view on;
  std::string_view off;

  bool IsSwitch() const { return !on.empty() || !off.empty(); }
};
std::span<const HorovodAlias> HorovodAliases();
// Horovod's value as one of ours; none if it says nothing about the option. Precondition: that of a
// switch is a ParseBool().
std::optional<std::string> MeaningOf(const HorovodAlias& alias, const std::string& value);

struct OptionSpec {
  std::string_view name;  // "fusion_bytes"
  OptionKind kind{};
  std::int64_t min = 0;
  std::int64_t max = 0;
  std::string_view zero;  // what zero means, if it is allowed beside [min, max]
  bool agreed = false;    // the same on all ranks
  std::span<const std::string_view> choices;
  std::string_view help;
  // `get` and `set` are there for all kinds but kText.
  std::int64_t (*get)(const Config&) = nullptr;
  void (*set)(Config&, std::int64_t) = nullptr;
  std::string Config::*text = nullptr;  // of kText

  std::string Flag() const;      // "--sirtaki-fusion-bytes"
  std::string Variable() const;  // "SIRTAKI_FUSION_BYTES"
};

std::span<const OptionSpec> OptionTable();
const OptionSpec* FindOption(std::string_view name);  // null if there is none

// Variables that begin as ours do and are not options: of sirtakirun, of the tests, the benchmarks
// and the scripts around the library, all of which pass their environment on to the ranks.
bool IsForeignVariable(std::string_view name);

// None if the text is no value of the option's kind, or out of its bounds.
std::optional<std::int64_t> ParseOptionValue(const OptionSpec& option, std::string_view text);
bool IsAllowedValue(const OptionSpec& option, std::int64_t value);
std::optional<bool> ParseBool(std::string_view text);

// Sets the option from a text; false if it is no value of it.
bool SetOptionFromText(const OptionSpec& option, std::string_view text, Config* config);
// OptionText is the option's value as a text that SetOptionFromText reads back.
std::string OptionText(const OptionSpec& option, const Config& config);

// A text that ParseOptionValue reads back: "64M", "1min", "warning".
std::string FormatOptionValue(const OptionSpec& option, std::int64_t value);
// "a size from 0 to 1024G, …": completes "allowed is …".
std::string AllowedValues(const OptionSpec& option);

}  // namespace sirtaki::core
