// Texts taken apart. Pure.
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/text.h"

namespace sirtaki::launch {

// The pieces between the separators, as they stand; an empty text has none.
std::vector<std::string_view> Split(std::string_view text, char separator);
// The pieces between spaces and tabs, none of them empty.
std::vector<std::string_view> Words(std::string_view text);
using core::Trimmed;
// Whether it has digits and dots alone, as an IPv4 address and no host's name.
bool IsAddress(std::string_view host);
std::string Joined(const std::vector<std::string>& parts, std::string_view between);

// The whole number that the text is, from `min` to `max`.
template <typename Integer>
std::optional<Integer> NumberFrom(std::string_view text, Integer min, Integer max) {
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (value < min || value > max) return std::nullopt;
  return value;
}

// The text is taken apart as by a shell: words between spaces, quotes of both kinds, backslashes.
// None if a quote is not closed.
std::optional<std::vector<std::string>> ShellWords(std::string_view text);
// The word is quoted where it must be for a shell to read it back.
std::string ShellQuoted(std::string_view word);
// The words as one line, each quoted where it must be.
std::string ShellLine(std::vector<std::string> words);

}  // namespace sirtaki::launch
