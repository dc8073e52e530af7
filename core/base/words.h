// Texts are taken apart into pieces and numbers, and put together again. Pure.
#pragma once

#include <charconv>
#include <concepts>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <vector>

namespace sirtaki::core {

// Split gives the pieces between the separators, as they stand; an empty text has none.
std::vector<std::string_view> Split(std::string_view text, char separator);
// Words gives the pieces between spaces and tabs, none of them empty.
std::vector<std::string_view> Words(std::string_view text);

// Joined puts the texts or numbers together, in their order.
template <class List>
std::string Joined(const List& parts, std::string_view between) {
  std::string text;
  for (auto part = std::begin(parts); part != std::end(parts); ++part) {
    if (part != std::begin(parts)) text += between;
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(*part)>>) {
      text += std::to_string(*part);
    } else {
      text += *part;
    }
  }
  return text;
}

// NumberFrom reads the whole number that the text is, from `min` to `max`.
template <typename Integer>
std::optional<Integer> NumberFrom(std::string_view text, Integer min, Integer max) {
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (value < min || value > max) return std::nullopt;
  return value;
}

// CountText gives "1 rank", "3 ranks".
template <std::integral Number>
std::string CountText(Number count, std::string_view one) {
  return std::to_string(count).append(" ").append(one).append(count == 1 ? "" : "s");
}

}  // namespace sirtaki::core
