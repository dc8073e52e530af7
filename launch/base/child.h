// A process that this one starts.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "launch/base/descriptor.h"
#include "launch/base/loop.h"
#include "launch/base/rank_messages.h"

namespace sirtaki::launch {

// Lets this process have as many files open as the system allows. What it starts from then on has
// the limit as it was: select() in a program may not stand more. Returns how many.
std::size_t RaiseFileLimit();

// The current folder of this process; empty if it is gone.
std::string CurrentFolder();

struct Command {
  std::vector<std::string> words;
  std::vector<std::pair<std::string, std::string>> set;  // variables, over those of this process
  std::vector<std::string> unset;
  bool own_group = false;  // whether signals of the terminal, or to this group, pass it by
  bool outlives = false;   // this process, if that dies
  int input = 0;           // the descriptor that is its standard input
  // The child reads /dev/null if its `input` is this, as is a descriptor that could not be opened.
  static constexpr int kNoInput = -1;
};

class Child {
 public:
  // `take` is called once for a stream that was asked for, when there is something to be read. It is to
  // read, and says whether there was something that it wants more of.
  Child(Loop* loop, const std::function<bool(Stream)>& take);
  // Finds the program on PATH. It is killed when this process dies, if the
  // command does not say otherwise. kBackend: it cannot be started,
  // with errno in `*error`.
  core::Status Start(const Command& command, int* error);

  // How it has ended, once it has.
  std::optional<EndMessage> Ended();
  // Nothing after it has ended. `group`: also to what it has started, in the group that it leads.
  void Signal(int signal, bool group = false) const;
  // True if it has made itself the leader of a group, as `timeout` and `setsid` do: what it starts is in
  // that one, too.
  bool LeadsGroup() const;
  void SignalAll(int signal) const;  // to its group, if it leads one
  bool running() const { return pid_ > 0; }
  void Ask(Stream stream) { Of(stream).Ask(); }
  void AskAll();  // asks for both streams
  // Drain has all taken that there is now, after the end: programs that the child has left may hold the
  // pipes open, as ssh does that serves later calls.
  void Drain();
  // Reads what it has printed and there is now; empty if there is nothing.
  std::string Read(Stream stream, std::size_t most = kReadSize);
  std::size_t Unread(Stream stream) const;  // the bytes that it would read, without a limit
  bool prints() const;                      // or something that it has started
  void StopReading();

 private:
  Source& Of(Stream stream) { return stream == Stream::kOutput ? output_ : error_; }

  const std::function<bool(Stream)> take_;
  pid_t pid_ = -1;
  Source output_;
  Source error_;
};

}  // namespace sirtaki::launch
