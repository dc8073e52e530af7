#include "launch/job/rank_lines.h"

#include <algorithm>
#include <utility>

#include "core/base/text.h"

namespace sirtaki::launch {
namespace {

constexpr std::size_t kLongestPiece = std::size_t{1} << 20;
constexpr std::size_t kKeptBytes = 500;

bool TakePrefix(std::string_view prefix, std::string_view* text) {
  if (!text->starts_with(prefix)) return false;
  text->remove_prefix(prefix.size());
  return true;
}

bool TakeNumber(std::string_view* text) {
  const std::size_t length = std::min(text->find_first_not_of("0123456789"), text->size());
  text->remove_prefix(length);
  return length > 0;
}

// "[a:4711] [ 3] ./train(+0x33795)[0x5605f43c4795]" and what stands around it: Open MPI prints it
// at a signal. Not its words about a failed call, which say why a rank has ended.
bool IsBacktraceOfOpenMpi(std::string_view line) {
  const std::size_t colon = line.find(':');
  if (!line.starts_with('[') || colon == std::string_view::npos) return false;
  line.remove_prefix(colon + 1);
  if (!TakeNumber(&line) || !TakePrefix("] ", &line)) return false;
  for (const std::string_view begin :
       {"*** Process received signal ***", "*** End of error message ***",
        "Signal: ", "Signal code: ", "Associated errno: ", "Failing at address: "}) {
    if (line.starts_with(begin)) return true;
  }
  if (!TakePrefix("[", &line)) return false;
  TakePrefix(" ", &line);
  return TakeNumber(&line) && line.starts_with("] ");
}

// LibTorch's, in the text of an exception.
bool IsBacktraceOfTorch(std::string_view line) {
  if (line.starts_with("Exception raised from ")) {
    return line.ends_with(" (most recent call first):");
  }
  return TakePrefix("frame #", &line) && TakeNumber(&line) && line.starts_with(": ");
}

bool IsOfBacktrace(std::string_view line) {
  return IsBacktraceOfOpenMpi(line) || IsBacktraceOfTorch(line);
}

// The bytes at the end that begin a character of UTF-8 and do not end it.
std::size_t BegunCharacter(std::string_view text) {
  for (std::size_t count = 1; count <= std::min<std::size_t>(3, text.size()); ++count) {
    const auto byte = static_cast<unsigned char>(text[text.size() - count]);
    if (byte >= 0x80 && byte < 0xC0) continue;  // it goes on
    const std::size_t length = byte < 0xC0 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
    return length > count ? count : 0;
  }
  return 0;
}

}  // namespace

std::string LinePrefixer::Append(std::string_view bytes, std::string_view prefix) {
  // Nothing before has an end of a line, unless it is the "\r" that waits.
  const std::size_t from = rest_.ends_with('\r') ? rest_.size() - 1 : rest_.size();
  rest_.append(bytes);
  std::string lines;
  std::size_t begin = 0;
  while (begin < rest_.size()) {
    std::size_t end = rest_.find_first_of("\r\n", std::max(begin, from));
    if (end == std::string::npos) break;
    if (rest_[end] == '\r') {
      if (end + 1 == rest_.size()) break;  // "\r\n" may become whole
      if (rest_[end + 1] == '\n') ++end;
    }
    lines.append(prefix).append(rest_, begin, end + 1 - begin);
    begin = end + 1;
  }
  rest_.erase(0, begin);
  if (rest_.size() >= kLongestPiece) {
    std::string next = rest_.substr(rest_.size() - BegunCharacter(rest_));
    rest_.resize(rest_.size() - next.size());
    lines += Finish(prefix);
    rest_ = std::move(next);
  }
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
    if (!open_) BeginLine();
    std::string& line = lines_.back();
    line.append(bytes.substr(begin, std::min(end - begin, kKeptBytes - line.size())));
    open_ = end == bytes.size();
    begin = end + 1;
  }
}

void LastLines::BeginLine() {
  if (!lines_.empty() && IsOfBacktrace(lines_.back())) lines_.pop_back();
  lines_.emplace_back();
  if (lines_.size() > kKeptLines) lines_.pop_front();
}

std::deque<std::string> LastLines::Lines() const {
  std::deque<std::string> lines;
  for (const std::string& line : lines_) {
    if (!IsOfBacktrace(line)) lines.push_back(core::Escaped(line));
  }
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

}  // namespace sirtaki::launch
