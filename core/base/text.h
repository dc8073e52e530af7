// How names and times are written for people. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/base/types.h"

namespace sirtaki::core {

// "250 us", "500 ms", "1.5 s", "60 s", "30 min", "2.5 h": rounded to three digits, above two
// minutes to one decimal.
std::string DurationText(Duration duration);

// Control characters and bytes that are no UTF-8 as \n, \t, \r or \x07, so that a text from
// elsewhere cannot break a line or steer a terminal. The rest stays as it is.
std::string Escaped(std::string_view text);

// A name between quotes: escaped, its own quotes and backslashes too. Of a name of more than 128
// bytes the beginning and the end, followed by its length: "encoder.aaa...bias" (4000 bytes).
std::string Quoted(std::string_view name);

// ShapeText gives "[3, 4]". `any_rows`: a first dimension may be anything: "[*, 3, 4]".
std::string ShapeText(std::span<const std::int64_t> shape, bool any_rows = false);

// The name of an enumerator that counts from 0.
template <class Enum, std::size_t kCount>
std::string_view NameIn(const std::string_view (&names)[kCount], Enum value) {
  const auto index = static_cast<std::size_t>(value);
  return index < kCount ? names[index] : "unknown";
}

// Trimmed gives the text without spaces, tabs and the ends of lines around it.
std::string_view Trimmed(std::string_view text);

}  // namespace sirtaki::core
