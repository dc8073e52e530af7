// What sirtakirun tells itself on another host, by ssh's standard input, to start ranks there. On a
// command line everybody could read the values of variables. Pure.
//
//   order := "sirtakirun VERSION LENGTH\n", then LENGTH bytes: variables words
//   variables := varint count, as many times: text name, text value
//   words := varint count, as many times: text
//
// What follows is the standard input of rank 0, if that is there.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::launch {

struct StartOrder {
  std::vector<std::pair<std::string, std::string>> variables;
  std::vector<std::string> words;  // what a rank is started by
  bool operator==(const StartOrder&) const = default;
};

// The longest first line, and the longest rest.
inline constexpr std::size_t kMaxOrderHead = 128;
inline constexpr std::size_t kMaxOrder = std::size_t{64} * 1024 * 1024;

std::string Encode(const StartOrder& order, std::string_view version);

// Reads the first line, without its end. kProtocol: it is none, or of another version than this
// one: says which.
core::Status ReadOrderHead(std::string_view line, std::string_view version, std::size_t* length);
// Reads the rest. kProtocol: it is none; `*out` is as it was then.
core::Status ReadOrder(std::string_view bytes, StartOrder* out);

}  // namespace sirtaki::launch
