// What somebody may have meant who wrote a word that is not known. Pure.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace sirtaki::core {

// The known word that is nearest to the given one; empty if none is near enough to be meant. The
// first `prefix` characters, which all words of this kind begin with, do not count for what is
// near.
std::string NearestWord(std::string_view given, const std::vector<std::string>& known,
                        std::size_t prefix = 0);
// "; the nearest known is --np", or nothing.
std::string NearestText(std::string_view given, const std::vector<std::string>& known,
                        std::size_t prefix = 0);

}  // namespace sirtaki::core
