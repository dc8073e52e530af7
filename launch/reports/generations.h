// What sirtakirun writes down of the generations of an elastic job, for those who read its timeline or
// its flight records later: a file of lines, each an object of JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::launch {

inline constexpr std::string_view kGenerationsFile = "generations.jsonl";

struct GenerationNote {
  enum class Kind : std::uint8_t {
    kDecided,  // who is in it
    kJoined,   // all of them have come together
    kTrains,   // and have the state
    kLeft,     // a worker is gone. `text`: how it has ended
    kOver,     // `text`: why
    kEnded,    // the job ends in it. `text`: why
  };
  Kind kind{};
  int generation = 0;
  core::TimePoint at{};         // by the clock of sirtakirun's machine
  std::string host;             // which that is; of kLeft the worker's
  std::vector<int> workers;     // kDecided: by rank; kLeft: the one
  std::vector<std::string> on;  // their hosts; kDecided only
  std::string text;
  bool operator==(const GenerationNote&) const = default;
};

// The line, without its end.
std::string ToLine(const GenerationNote& note);
// Nothing if it is none.
std::optional<GenerationNote> NoteFrom(std::string_view line);

// What is known of a generation. Times that did not come are none.
struct Generation {
  struct Member {
    int worker = 0;
    std::string host;
  };
  int number = 0;
  std::string host;  // sirtakirun's
  std::vector<Member> members;
  std::vector<GenerationNote> left;
  std::optional<core::TimePoint> decided, joined, trains, over;
  std::string why_over;
};

// The generations of the file in a folder, by number; lines that are none are passed over. Empty: there is
// no such file. kInvalidArgument if it cannot be read.
core::Status ReadGenerations(const std::string& folder, std::vector<Generation>* generations);

// "worker 4 on host b"
std::string NameOf(int worker, const std::string& host);
// "3 ranks: workers 0-1 on host a, 4 on host b"
std::string MembersText(const std::vector<Generation::Member>& members);

// A few lines that tell who was in each, how long the change to it took, and why it is over. Of more than
// a person reads, the last ones. Has no control characters but ends of lines.
std::string GenerationsText(const std::vector<Generation>& generations);

}  // namespace sirtaki::launch
