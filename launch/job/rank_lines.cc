#include "launch/job/rank_lines.h"

#include <algorithm>

#include "core/base/text.h"

namespace sirtaki::launch {
namespace {

constexpr std::size_t kLongestPiece = 64 * 1024;
constexpr std::size_t kKeptLines = 20;
constexpr std::size_t kKeptBytes = 500;

}  // namespace

std::string LinePrefixer::Append(std::string_view bytes, std::string_view prefix) {
  rest_.append(bytes);
  std::string lines;
  std::size_t begin = 0;
  while (begin < rest_.size()) {
    std::size_t end = rest_.find_first_of("\r\n", begin);
    if (end == std::string::npos) break;
    if (rest_[end] == '\r') {
      if (end + 1 == rest_.size()) break;  // "\r\n" may become whole
      if (rest_[end + 1] == '\n') ++end;
    }
    lines.append(prefix).append(rest_, begin, end + 1 - begin);
    begin = end + 1;
  }
  rest_.erase(0, begin);
  if (rest_.size() >= kLongestPiece) lines += Finish(prefix);
  return lines;
}

std::string LinePrefixer::Finish(std::string_view prefix) {
  if (rest_.empty()) return {};
  std::string line = std::string(prefix) + rest_;
  if (line.back() != '\r') line += '\n';
  rest_.clear();
  return line;
}

void LastLines::Append(std::string_view bytes) {
  for (std::size_t begin = 0; begin < bytes.size();) {
    const std::size_t end = std::min(bytes.find('\n', begin), bytes.size());
    if (!open_) lines_.emplace_back();
    std::string& line = lines_.back();
    line.append(bytes.substr(begin, std::min(end - begin, kKeptBytes - line.size())));
    open_ = end == bytes.size();
    begin = end + 1;
    if (lines_.size() > kKeptLines) lines_.pop_front();
  }
}

std::deque<std::string> LastLines::Lines() const {
  std::deque<std::string> lines;
  for (const std::string& line : lines_) lines.push_back(core::Escaped(line));
  return lines;
}

}  // namespace sirtaki::launch
