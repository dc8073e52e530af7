#include "launch/job/failure_judgement.h"

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <regex>
#include <string_view>
#include <utility>

#include "core/base/status.h"
#include "core/base/text.h"
#include "core/machine/start_notice.h"
#include "launch/job/rank_lines.h"

namespace sirtaki::launch {
namespace {

// PMIx ends a process with this code if its server is gone.
constexpr int kOrphanOfPmix = 195;
// Python ends with this code after an exception that nobody has caught.
constexpr int kUncaughtOfPython = 1;
// The dynamic linker ends a program with this code if its libraries do not fit.
constexpr int kNotLinked = 127;

std::string WhoIs(int rank, const std::string& host) {
  return "rank " + std::to_string(rank) + " on host " + core::Escaped(host);
}

// The hint is what such an end often means.
std::string Hint(int signal) {
  switch (signal) {
    case SIGKILL:
      return ": somebody killed it, or the system for lack of memory (see dmesg)";
    case SIGBUS:
      return ": often a full /dev/shm (df /dev/shm)";
    case SIGILL:
      return ": the program was built for another processor";
    default:
      return "";
  }
}

bool LacksLibraries(const EndMessage& end, const std::deque<std::string>& last_lines) {
  return end.value == kNotLinked &&
         std::any_of(last_lines.begin(), last_lines.end(), [](const std::string& line) {
           return line.find(": error while loading shared libraries: ") != std::string::npos ||
                  line.find(": symbol lookup error: ") != std::string::npos;
         });
}

// Whether its last words are an error of Sirtaki's about another rank (docs/errors.md): then that
// one's end is what counts.
bool IsAboutAnother(int rank, const std::deque<std::string>& last_lines) {
  static const std::regex kRank(
      R"((?:\(from rank |\brank (?=\d+ (?:is lost|has shut down)))(\d+))");
  const std::string own = std::to_string(rank);
  return std::any_of(last_lines.begin(), last_lines.end(), [&own](const std::string& line) {
    return std::any_of(std::sregex_iterator(line.begin(), line.end(), kRank),
                       std::sregex_iterator(),
                       [&own](const std::smatch& match) { return match[1].str() != own; });
  });
}

// Takes what libstdc++ says before it aborts a program for an exception that nobody has caught: its
// type, and its text, of which this removes the first line. Empty if there is no such thing.
std::string TakeThrown(std::deque<std::string>* lines) {
  constexpr std::string_view kBegin = "terminate called after throwing an instance of '";
  constexpr std::string_view kText = "  what():  ";
  const auto line = std::find_if(lines->rbegin(), lines->rend(), [&](const std::string& text) {
    return text.find(kBegin) != std::string::npos;
  });
  if (line == lines->rend()) return {};
  std::string thrown = line->substr(line->find(kBegin) + kBegin.size());
  if (thrown.ends_with('\'')) thrown.pop_back();
  auto next = lines->erase(std::prev(line.base()));
  if (next != lines->end() && next->starts_with(kText)) {
    thrown += ": " + next->substr(kText.size());
    lines->erase(next);
  }
  return thrown;
}

// The line that ends the last traceback of Python's, which it removes: the type and the first line
// of the text of the exception that nobody has caught. Empty if there is none.
std::string TakeRaised(std::deque<std::string>* lines) {
  static const std::regex kRaised(R"([A-Za-z_][\w.]*(: .*)?)");
  const auto is_frame = [](const std::string& text) { return text.starts_with("  "); };
  for (std::size_t i = lines->size(); i-- > 1;) {
    if (is_frame((*lines)[i]) || !is_frame((*lines)[i - 1])) continue;
    if (!std::regex_match((*lines)[i], kRaised)) continue;
    std::size_t begin = i;
    bool has_file = false;
    while (begin > 0 && is_frame((*lines)[begin - 1])) {
      --begin;
      has_file = has_file || (*lines)[begin].starts_with("  File \"");
    }
    if (!has_file) continue;
    // The head of a long one is not among the last lines.
    if (begin > 0 && !(*lines)[begin - 1].ends_with("Traceback (most recent call last):")) continue;
    // The exception of a thread, or of an object's end: the program goes on. Where the line that says
    // so may have been pushed out, nobody can say.
    if (begin == 1 && lines->size() >= kKeptLines) continue;
    if (begin > 1 && (*lines)[begin - 2].starts_with("Exception ")) continue;
    std::string raised = std::move((*lines)[i]);
    lines->erase(lines->begin() + static_cast<std::ptrdiff_t>(i));
    return raised;
  }
  return {};
}

}  // namespace

std::string EndText(const EndMessage& end) {
  if (end.kind == EndKind::kNotStarted) return end.text;
  if (end.kind == EndKind::kSignalled) return "died of " + SignalName(end.value);
  return "ended with exit code " + std::to_string(end.value);
}

std::string SignalName(int signal) {
  const char* const name = sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name : "signal " + std::to_string(signal);
}

std::optional<Failure> JudgeEnd(int rank, const std::string& host, const EndMessage& end,
                                const std::deque<std::string>& last_lines) {
  if (end.kind == EndKind::kExited && end.value == 0) return std::nullopt;
  Failure failure;
  failure.rank = rank;
  failure.last_lines = last_lines;
  failure.how = EndText(end);
  std::string hint;
  switch (end.kind) {
    case EndKind::kExited:
      failure.code = end.value;
      failure.follows = IsAboutAnother(rank, last_lines);
      if (std::string raised =
              end.value == kUncaughtOfPython ? TakeRaised(&failure.last_lines) : "";
          !raised.empty()) {
        failure.how = "raised " + raised;
        if (raised == "ModuleNotFoundError: No module named 'horovod'") {
          failure.how += ": sirtakirun --as-horovod runs such a program on Sirtaki";
        }
      } else if (end.value == kOrphanOfPmix) {
        failure.how += ": its MPI gave up, as it does when its launcher's process on the host dies";
      } else if (LacksLibraries(end, last_lines)) {
        failure.how +=
            ": a library is missing, or is of another version than the program: sirtakirun "
            "--check-build says which LibTorch Sirtaki needs, and which is there";
      }
      break;
    case EndKind::kSignalled:
      failure.code = 128 + end.value;
      // SIGPIPE: whom it was connected with is gone.
      failure.follows = end.told || end.value == SIGPIPE || IsAboutAnother(rank, last_lines);
      if (std::string thrown = end.value == SIGABRT ? TakeThrown(&failure.last_lines) : "";
          !thrown.empty()) {
        failure.how = "threw " + thrown;
      } else {
        hint = Hint(end.value);
      }
      break;
    case EndKind::kNotStarted:
      failure.code = 127;
      failure.may_pass = false;
      failure.text = WhoIs(rank, host) + ": " + core::Escaped(end.text);
      return failure;
  }
  failure.text = WhoIs(rank, host) + " " + failure.how + hint;
  return failure;
}

Failure JudgeLoss(int rank, const std::string& host, const std::string& why, bool gone,
                  const std::deque<std::string>& last_lines) {
  Failure failure{1, WhoIs(rank, host) + " was lost: " + why, last_lines};
  failure.follows = !gone;
  failure.lost = true;
  failure.rank = rank;
  return failure;
}

bool IsGone(bool silent, bool stops, bool run_has_failed, bool others_were_told) {
  return silent || !run_has_failed || (others_were_told && !stops);
}

bool IsCauseOf(const Failure& next, const Failure& first, bool stopped) {
  return first.follows && !next.follows && (!stopped || next.lost);
}

bool IsCause(const std::string& fault, const Failure& failure) {
  if (fault.empty()) return false;
  const auto name = [](core::StatusCode code) {
    return std::string(core::StatusCodeName(code)) + ": ";
  };
  const bool is_loss = fault.starts_with(name(core::StatusCode::kPeerLost));
  const bool is_exit = fault.starts_with(name(core::StatusCode::kAborted) +
                                         std::string(core::kProgramExited) + " with code ");
  if (!is_loss && !is_exit) return true;
  const std::string own = "(from rank " + std::to_string(failure.rank);
  const bool is_own = fault.ends_with(own + ")") || fault.find(own + " ") != std::string::npos;
  return failure.follows && !(is_exit && is_own);
}

void Verdict::Take(Failure next, bool stopped) {
  if (failure && !IsCauseOf(next, *failure, stopped)) return;
  failure = std::move(next);
  AddFault();
}

void Verdict::TakeFault(int rank, std::string_view text) {
  std::erase_if(faults, [rank](const auto& told) { return told.first == rank; });
  if (!text.empty()) faults.emplace_back(rank, core::Escaped(text));
}

void Verdict::AddFault() {
  if (faults.empty() || !IsCause(faults.front().second, *failure)) return;
  failure->fault = faults.front().second;
}

void Verdict::NoteGoodEnd(int rank, const std::string& host, bool stopped) {
  if (!stopped && left_early.empty()) left_early = WhoIs(rank, host);
}

void Verdict::Conclude() {
  if (!failure || !failure->follows || failure->lost) return;
  AddFault();
  if (!failure->fault.empty() || left_early.empty()) return;
  failure->text =
      left_early + " ended with exit code 0 while others ran, and then " + failure->text;
  failure->follows = false;
}

std::string FailureText(const Failure& failure) {
  std::string text;
  // An error that nobody has caught says it already.
  const bool is_said = failure.text.find(failure.fault) != std::string::npos;
  if (!failure.fault.empty() && !is_said) text = "sirtakirun: first fault: " + failure.fault + "\n";
  if (!failure.text.empty()) text += "sirtakirun: " + failure.text + "\n";
  // A failure that follows from a fault that is told has nothing to add.
  if (failure.last_lines.empty() || (failure.follows && !failure.fault.empty())) return text;
  text += "sirtakirun: its last lines on standard error:\n";
  for (const std::string& line : failure.last_lines) text += "sirtakirun:   " + line + "\n";
  return text;
}

}  // namespace sirtaki::launch
