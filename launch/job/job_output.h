// The output of the ranks passes here, on its way to the terminal or to files.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/environment.h"
#include "core/base/status.h"
#include "core/base/types.h"
#include "launch/base/descriptor.h"
#include "launch/base/loop.h"
#include "launch/base/rank_messages.h"
#include "launch/job/rank_lines.h"
#include "launch/options/options.h"

namespace sirtaki::launch {

class JobOutput {
 public:
  explicit JobOutput(Loop* loop);

  // Makes the files, if there are to be some, or goes on with them if they are opened `again`.
  // kBackend: a file cannot be written, and why.
  core::Status Open(const LaunchOptions& options, int ranks, bool again,
                    const core::EnvironmentView& env);

  // One rank more, which gets the next number. Errors as Open's.
  core::Status AddRank();

  void Append(int rank, Stream stream, std::string_view bytes);
  void Finish(int rank);  // it prints nothing more
  // Appends what the launcher prints, line by line; at its end the rest of it.
  void AppendOfLauncher(Stream stream, std::string_view bytes);
  void FinishLauncher();
  // Appends a line of sirtakirun's own to standard error, also after Discard.
  void Tell(const std::string& text);
  std::deque<std::string> LastErrorLines(int rank) const { return of_[At(rank)].errors.Lines(); }

  // What stands before each line: the time and a space, or nothing.
  std::string TimePrefix() const;
  // Whether something waits for the terminal (or what stands for it).
  bool HasWaiting(Stream stream) const { return !waiting_[Index(stream)].empty(); }
  // Writes what waits, piece by piece, when it can be written without blocking.
  void WriteWhenReady();
  // Writes what waits for standard error, at most until then, and runs the loop meanwhile.
  void WriteLast(core::TimePoint until);
  // Ranks, and how many bytes of theirs have been written since.
  std::vector<std::pair<int, std::size_t>> TakeWritten() { return std::exchange(written_, {}); }
  // Discards what waits, and what comes yet.
  void Discard();
  // Whether something could not be written, which was told then. Where nobody reads any more, as
  // behind `| head`, nothing has failed.
  bool failed() const { return failed_; }

 private:
  struct OfRank {
    std::array<LinePrefixer, 2> lines;
    std::array<Descriptor, 2> files;
    LastLines errors;
  };
  struct Piece {
    std::string text;
    int rank = 0;
    std::size_t bytes = 0;  // of the rank's
  };

  static std::size_t At(int rank) { return static_cast<std::size_t>(rank); }
  static std::size_t Index(Stream stream) { return static_cast<std::size_t>(stream); }
  static Stream Other(Stream stream) {
    return stream == Stream::kOutput ? Stream::kError : Stream::kOutput;
  }
  std::string Prefix(int rank, Stream stream) const;
  // Lets the lines wait for the terminal; `bytes` of the rank's are written with them.
  void Put(Stream stream, std::string lines, int rank, std::size_t bytes);
  // Whether it is this stream's turn: where both go to the same place they take turns, line by
  // line.
  bool Wants(Stream stream) const;
  void Write(Stream stream);
  core::Status OpenFile(const std::string& folder, Stream stream, bool again, Descriptor* out);
  void WriteFile(int fd, std::string_view bytes);
  // Nothing more is written to it: nobody reads it, or `why`.
  void Lose(Stream stream, const std::string& why);

  Loop* const loop_;
  bool timestamps_ = false;
  std::string folder_;  // of the files; empty: there are none
  bool again_ = false;
  bool file_failed_ = false;
  bool failed_ = false;
  std::array<bool, 2> lost_{};
  bool one_place_ = false;         // both streams go there
  Stream turn_ = Stream::kOutput;  // then, who writes next if both wait
  std::array<bool, 2> colors_{};
  std::vector<OfRank> of_;
  std::array<LinePrefixer, 2> launcher_lines_;
  std::array<std::deque<Piece>, 2> waiting_;
  Source output_;  // can be read when standard output can be written
  Source error_;
  std::vector<std::pair<int, std::size_t>> written_;
};

}  // namespace sirtaki::launch
