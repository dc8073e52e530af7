#include "core/base/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace sirtaki::core {
namespace {

constexpr std::size_t kLongestShown = 128;
constexpr std::size_t kShownHead = 80;
constexpr std::size_t kShownTail = 40;

std::uint8_t ByteAt(std::string_view text, std::size_t at) {
  return static_cast<std::uint8_t>(text[at]);
}

bool IsContinuation(std::uint8_t byte) { return (byte & 0xC0U) == 0x80U; }

// Bytes of the UTF-8 character that begins here; 0 if none does (RFC 3629: neither overlong forms
// nor surrogates).
std::size_t CharacterLength(std::string_view text, std::size_t at) {
  const std::uint8_t first = ByteAt(text, at);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xC2 && first <= 0xDF   ? 2
                             : first >= 0xE0 && first <= 0xEF ? 3
                             : first >= 0xF0 && first <= 0xF4 ? 4
                                                              : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!IsContinuation(ByteAt(text, at + i))) return 0;
  }
  const std::uint8_t second = ByteAt(text, at + 1);
  const bool bad = (first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
                   (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F);
  return bad ? 0 : length;
}

void AppendHex(std::uint8_t byte, std::string* out) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  out->append("\\x").append(1, kDigits[byte >> 4U]).append(1, kDigits[byte & 0xFU]);
}

void AppendEscaped(std::string_view text, bool in_quotes, std::string* out) {
  const auto is_plain = [](char c) { return c >= ' ' && c < '\x7f' && c != '"' && c != '\\'; };
  for (std::size_t at = 0; at < text.size();) {
    const auto from = text.begin() + static_cast<std::ptrdiff_t>(at);
    const auto until = std::find_if_not(from, text.end(), is_plain);
    out->append(from, until);
    at += static_cast<std::size_t>(until - from);
    if (at == text.size()) break;
    const std::size_t length = CharacterLength(text, at);
    const std::uint8_t byte = ByteAt(text, at);
    // C2 80 to C2 9F are control characters too, as some terminals see it.
    const bool shown = length > 1 ? byte != 0xC2 || ByteAt(text, at + 1) >= 0xA0
                                  : length == 1 && byte >= 0x20 && byte != 0x7F;
    if (shown) {
      if (in_quotes && (byte == '"' || byte == '\\')) out->push_back('\\');
      out->append(text.substr(at, length));
      at += length;
      continue;
    }
    const char* const known = byte == '\n'   ? "\\n"
                              : byte == '\t' ? "\\t"
                              : byte == '\r' ? "\\r"
                                             : nullptr;
    if (known != nullptr) {
      out->append(known);
    } else {
      AppendHex(byte, out);
    }
    ++at;
  }
}

}  // namespace

std::string DurationText(Duration duration) {
  struct Unit {
    const char* name;
    double seconds;
    double below;  // what would be shown as this much takes the next unit
  };
  constexpr std::array<Unit, 5> kUnits = {
      {{"us", 1e-6, 1000}, {"ms", 1e-3, 1000}, {"s", 1, 120}, {"min", 60, 120}, {"h", 3600, 0}}};
  const double seconds = std::chrono::duration<double>(duration).count();
  if (seconds == 0) return "0 s";
  const double size = std::abs(seconds);
  for (const Unit& unit : kUnits) {
    const double value = size / unit.seconds;
    const bool digital = unit.seconds <= 1;
    const double step = !digital || (value >= 10 && value < 100) ? 10 : value < 10 ? 100 : 1;
    const double rounded = std::round(value * step) / step;
    if (rounded >= unit.below && unit.below > 0) continue;
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), "%s%.10g %s", seconds < 0 ? "-" : "", rounded,
                  unit.name);
    return text.data();
  }
  return {};  // the last unit has no end
}

std::string Escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  AppendEscaped(text, /*in_quotes=*/false, &out);
  return out;
}

std::string Quoted(std::string_view name) {
  std::string out = "\"";
  if (name.size() <= kLongestShown) {
    AppendEscaped(name, /*in_quotes=*/true, &out);
    out += '"';
    return out;
  }
  // The cut is moved so that it is not in the middle of a character.
  std::size_t head = kShownHead;
  while (head > kShownHead - 3 && IsContinuation(ByteAt(name, head))) --head;
  std::size_t tail = name.size() - kShownTail;
  while (tail < name.size() - kShownTail + 3 && IsContinuation(ByteAt(name, tail))) ++tail;
  AppendEscaped(name.substr(0, head), /*in_quotes=*/true, &out);
  out += "...";
  AppendEscaped(name.substr(tail), /*in_quotes=*/true, &out);
  return out + "\" (" + std::to_string(name.size()) + " bytes)";
}

std::string ShapeText(std::span<const std::int64_t> shape, bool any_rows) {
  std::string text = any_rows ? "[*" : "[";
  for (const std::int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpaces) - begin + 1);
}

}  // namespace sirtaki::core
