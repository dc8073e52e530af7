// How a run ended: which rank failed first, of what, and the exit code that follows. Pure.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/base/rank_messages.h"

namespace sirtaki::launch {

// The first thing that went wrong.
struct Failure {
  int code = 1;                        // to exit with
  std::string text;                    // "rank 2 on host b died of SIGKILL"
  std::deque<std::string> last_lines;  // of the rank's standard error
  bool may_pass = true;                // whether another attempt may go well
  // It follows from another rank's end, which comes yet: it says so, or the launcher's signal has
  // ended it.
  bool follows = false;
  bool lost = false;  // its rank's connection ended without a word
  std::string fault;  // of the group, which a rank has told before
  int rank = -1;      // that failed; -1: it is not about one
  std::string how;    // its process has ended, without hints: "died of SIGKILL"; empty: it is lost
  bool operator==(const Failure&) const = default;
};

// None if the rank ended well. What the rank threw or raised, and nobody caught, is in the text and
// not in the last lines again.
std::optional<Failure> JudgeEnd(int rank, const std::string& host, const EndMessage& end,
                                const std::deque<std::string>& last_lines);
// The rank's connection ended without a word. `gone`: not because of others.
Failure JudgeLoss(int rank, const std::string& host, const std::string& why, bool gone,
                  const std::deque<std::string>& last_lines);

// Whether such a rank is gone by itself, and its host with it, it seems. Launchers kill ranks when
// another has failed: Open MPI tells them to end before, MPICH and Slurm may not. So a rank that was
// not told, in a run that has failed, can be the reason only if its launcher has told others.
// `silent`: its host answers no more; `stops`: it was told to end.
bool IsGone(bool silent, bool stops, bool run_has_failed, bool others_were_told);

// Whether the first failure follows from the next one, which is then the cause. `stopped`: all ranks
// were told to stop. How they end after that says nothing, except of one that is lost.
bool IsCauseOf(const Failure& next, const Failure& first, bool stopped);

// Whether the fault tells more about the cause than this failure does: not where it is that a rank
// is lost or has exited, and this is how a rank has ended by itself, or the end of that very rank.
bool IsCause(const std::string& fault, const Failure& failure);

// The last words about a run, each line behind "sirtakirun: ". The fault comes first.
std::string FailureText(const Failure& failure);

// A verdict says why a run has failed, if one knows.
struct Verdict {
  // `stopped`: all ranks were told to stop.
  void Take(Failure next, bool stopped);
  // The fault of a rank's group; empty: the program has begun again.
  void TakeFault(int rank, std::string_view text);
  // The first fault goes with the failure if it tells more about the cause.
  void AddFault();
  // A rank has ended with exit code 0. `stopped`: as for Take.
  void NoteGoodEnd(int rank, const std::string& host, bool stopped);
  // All has ended. Where nothing tells what the failure follows from, and a rank has ended well by
  // itself, the others have missed that one: it may have left without a word, by _exit().
  void Conclude();

  std::optional<Failure> failure;  // the first, or what it follows from
  std::string left_early;          // the first rank that ended well by itself
  // The faults that ranks have told of their groups, in the order of their coming.
  std::vector<std::pair<int, std::string>> faults;
};

// The text says how a process has ended: "died of SIGKILL", "ended with exit code 3", or why it was not
// started.
std::string EndText(const EndMessage& end);
// "SIGKILL", or "signal 42" where it has no name.
std::string SignalName(int signal);

}  // namespace sirtaki::launch
