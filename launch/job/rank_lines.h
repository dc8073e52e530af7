// The output of a rank, line by line, is prefixed and remembered here. Pure.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

namespace sirtaki::launch {

// Begins each line with a prefix. A line ends with "\n", or with "\r" as progress bars have it.
class LinePrefixer {
 public:
  // The lines that are whole now, each behind the prefix. One that is longer than 1 MiB comes in pieces,
  // which are lines of their own, and cut no character of UTF-8.
  std::string Append(std::string_view bytes, std::string_view prefix);
  // Gives what is left at the end, as a line.
  std::string Finish(std::string_view prefix);

 private:
  std::string rest_;
};

inline constexpr std::size_t kKeptLines = 20;

// The last lines of what was printed, for the words about a rank's end.
class LastLines {
 public:
  void Append(std::string_view bytes);
  // The lines are at most kKeptLines, of each at most 500 bytes, without control characters; the
  // last of them is not empty. Lines of the backtraces that Open MPI prints at a signal and
  // LibTorch in an exception are not among them: they would push out what says why.
  std::deque<std::string> Lines() const;

 private:
  void BeginLine();

  std::deque<std::string> lines_;  // the last one may still grow
  bool open_ = false;              // whether it may
};

}  // namespace sirtaki::launch
