// Texts as shells have them. Pure.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/text.h"
#include "core/base/words.h"

namespace sirtaki::launch {

using core::CountText;
using core::Joined;
using core::NumberFrom;
using core::Split;
using core::Trimmed;
using core::Words;

// Whether it has digits and dots alone, as an IPv4 address and no host's name.
bool IsAddress(std::string_view host);

// The text is taken apart as by a shell: words between spaces, quotes of both kinds, backslashes.
// None if a quote is not closed.
std::optional<std::vector<std::string>> ShellWords(std::string_view text);
// The word is quoted where it must be for a shell to read it back.
std::string ShellQuoted(std::string_view word);
// The words as one line, each quoted where it must be.
std::string ShellLine(std::vector<std::string> words);

}  // namespace sirtaki::launch
