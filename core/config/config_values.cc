// The texts of options' values: parsing, formatting, and what is allowed.
#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/config/config_table.h"
#include "core/config/config_units.h"

namespace sirtaki::core {

namespace {

struct Unit {
  std::string_view suffix;
  std::int64_t factor;
};
// The largest first; a bare number is in the unit without a suffix, or in seconds.
constexpr std::array<Unit, 4> kByteUnits = {{{"G", kGibi}, {"M", kMebi}, {"K", kKibi}, {"", 1}}};
constexpr std::array<Unit, 4> kTimeUnits = {
    {{"min", kMinute}, {"s", kSecond}, {"ms", kMillisecond}, {"us", 1}}};

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

// "1.5" with a factor of 1024 is 1536. None if it is no decimal number, not whole, or above 2^62.
std::optional<std::int64_t> Scaled(std::string_view number, std::int64_t factor) {
  constexpr std::int64_t kMax = std::int64_t{1} << 62;
  const std::size_t dot = std::min(number.find('.'), number.size());
  const std::string_view whole = number.substr(0, dot);
  const std::string_view fraction = number.substr(std::min(dot + 1, number.size()));
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  if (whole.empty() || !std::all_of(whole.begin(), whole.end(), is_digit)) return std::nullopt;
  if (dot < number.size() && fraction.empty()) return std::nullopt;
  if (!std::all_of(fraction.begin(), fraction.end(), is_digit)) return std::nullopt;

  std::int64_t value = 0;
  for (char c : whole) {
    if (value > kMax / 10) return std::nullopt;
    value = value * 10 + (c - '0');
  }
  if (value > kMax / factor) return std::nullopt;
  value *= factor;
  // Digit by digit: each leaves a remainder of the factor that the next one divides further.
  std::int64_t unit = factor;
  std::int64_t parts = 0;  // in units of factor / 10^digits
  std::int64_t power = 1;
  for (char c : fraction) {
    if (power > kMax / (10 * unit)) return std::nullopt;
    power *= 10;
    parts = parts * 10 + (c - '0');
  }
  if (parts * unit % power != 0) return std::nullopt;
  return value + parts * unit / power;
}

std::optional<std::int64_t> ParseWithUnits(std::string_view text, std::span<const Unit> units,
                                           std::int64_t bare_factor) {
  const std::size_t end = text.find_first_not_of("0123456789.");
  if (end == std::string_view::npos) return Scaled(text, bare_factor);
  const std::string suffix = Lower(text.substr(end));
  for (const Unit& unit : units) {
    if (!unit.suffix.empty() && Lower(unit.suffix) == suffix) {
      return Scaled(text.substr(0, end), unit.factor);
    }
  }
  return std::nullopt;
}

std::string FormatWithUnits(std::int64_t value, std::span<const Unit> units) {
  for (const Unit& unit : units) {
    if (value % unit.factor == 0) {
      return std::to_string(value / unit.factor).append(unit.suffix);
    }
  }
  return std::to_string(value);
}

}  // namespace

std::optional<bool> ParseBool(std::string_view text) {
  const std::string lower = Lower(text);
  for (std::string_view word : {"1", "true", "yes", "on"}) {
    if (lower == word) return true;
  }
  for (std::string_view word : {"0", "false", "no", "off"}) {
    if (lower == word) return false;
  }
  return std::nullopt;
}

bool IsAllowedValue(const OptionSpec& option, std::int64_t value) {
  if (value == 0 && (!option.zero.empty() || option.kind == OptionKind::kAutoOrCount)) return true;
  return value >= option.min && value <= option.max;
}

std::optional<std::int64_t> ParseOptionValue(const OptionSpec& option, std::string_view text) {
  std::optional<std::int64_t> value;
  switch (option.kind) {
    case OptionKind::kBytes:
      value = ParseWithUnits(text, kByteUnits, 1);
      break;
    case OptionKind::kAutoOrCount:
      if (Lower(text) == "auto") return 0;
      value = Scaled(text, 1);
      if (value == 0) return std::nullopt;  // zero is only how auto is kept
      break;
    case OptionKind::kCount:
      value = Scaled(text, 1);
      break;
    case OptionKind::kDuration:
      value = ParseWithUnits(text, kTimeUnits, kSecond);
      break;
    case OptionKind::kBool:
      if (const auto flag = ParseBool(text)) value = *flag ? 1 : 0;
      break;
    case OptionKind::kChoice: {
      std::string word = Lower(text);
      if (option.name == "log_level" && word == "fatal") word = "error";  // as Horovod says it
      const auto found = std::find(option.choices.begin(), option.choices.end(), word);
      if (found != option.choices.end()) value = found - option.choices.begin();
      break;
    }
    case OptionKind::kText:
      break;
  }
  if (!value || !IsAllowedValue(option, *value)) return std::nullopt;
  return value;
}

std::string FormatOptionValue(const OptionSpec& option, std::int64_t value) {
  switch (option.kind) {
    case OptionKind::kBytes:
      return value == 0 ? "0" : FormatWithUnits(value, kByteUnits);
    case OptionKind::kDuration:
      return value == 0 ? "0" : FormatWithUnits(value, kTimeUnits);
    case OptionKind::kBool:
      return value != 0 ? "true" : "false";
    case OptionKind::kChoice:
      if (IsAllowedValue(option, value)) {
        return std::string(option.choices[static_cast<std::size_t>(value)]);
      }
      break;
    case OptionKind::kAutoOrCount:
      if (value == 0) return "auto";
      break;
    case OptionKind::kCount:
    case OptionKind::kText:
      break;
  }
  return std::to_string(value);
}

bool SetOptionFromText(const OptionSpec& option, std::string_view text, Config* config) {
  if (option.kind == OptionKind::kText) {
    config->*option.text = text;
    return true;
  }
  const auto value = ParseOptionValue(option, text);
  if (value) option.set(*config, *value);
  return value.has_value();
}

std::string OptionText(const OptionSpec& option, const Config& config) {
  if (option.kind == OptionKind::kText) return config.*option.text;
  return FormatOptionValue(option, option.get(config));
}

std::string AllowedValues(const OptionSpec& option) {
  if (option.kind == OptionKind::kText) return "any text";
  const std::string range = "from " + FormatOptionValue(option, option.min) + " to " +
                            FormatOptionValue(option, option.max);
  const std::string zero = option.zero.empty() ? "" : "0 (" + std::string(option.zero) + "), or ";
  switch (option.kind) {
    case OptionKind::kBytes:
      return zero + "a size " + range + ", in bytes or with K, M or G (powers of 1024)";
    case OptionKind::kCount:
      return "a whole number " + range;
    case OptionKind::kAutoOrCount:
      return "auto, or a whole number " + range;
    case OptionKind::kDuration:
      return zero + "a time " + range + ", in seconds or with us, ms, s or min";
    case OptionKind::kBool:
      return "true or false";
    case OptionKind::kChoice:
    case OptionKind::kText:
      break;
  }
  std::string text = "one of ";
  for (std::size_t i = 0; i < option.choices.size(); ++i) {
    text.append(i == 0 ? "" : ", ").append(option.choices[i]);
  }
  return text;
}

}  // namespace sirtaki::core
