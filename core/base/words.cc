#include "core/base/words.h"

#include <algorithm>
#include <cstddef>

namespace sirtaki::core {

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  if (text.empty()) return pieces;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    pieces.push_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return pieces;
    begin = end + 1;
  }
}

std::vector<std::string_view> Words(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r";
  std::vector<std::string_view> words;
  for (std::size_t begin = 0;;) {
    begin = text.find_first_not_of(kSpaces, begin);
    if (begin == std::string_view::npos) return words;
    const std::size_t end = std::min(text.find_first_of(kSpaces, begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end;
  }
}

}  // namespace sirtaki::core
