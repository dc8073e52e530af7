// A membership gives orders: what is to be done with workers and generations.
#pragma once

#include <string>
#include <variant>
#include <vector>

namespace sirtaki::launch {

using WorkerId = int;

struct StartWorker {
  WorkerId worker = 0;
  std::string host;
  int slot = 0;  // of the host, which no other worker has now; see BeginGeneration
  bool operator==(const StartWorker&) const = default;
};
// The worker is to be killed, and its end to be told by NoteEnd.
struct EndWorker {
  WorkerId worker = 0;
  std::string why;
  bool operator==(const EndWorker&) const = default;
};
// The members are to ask for another generation where they can best, between two steps, and to answer at
// once that they have heard it; see NoteHeard.
struct AnnounceChange {
  int generation = 0;
  std::string why;
  std::vector<WorkerId> leaving;  // members that get no place in it: theirs are listed no more
  bool operator==(const AnnounceChange&) const = default;
};
// The generation has failed: those of its members that have not asked are to be told at once, and to
// answer at once that they have heard it, whatever they do; see NoteHeard.
struct EndGeneration {
  int generation = 0;
  std::vector<WorkerId> to;
  std::string why;
  bool operator==(const EndGeneration&) const = default;
};
struct BeginGeneration {
  int generation = 0;
  std::vector<WorkerId> members;  // by rank; those of a host follow each other
  std::vector<int> slots;  // theirs. A worker keeps the one that it had in its first generation
  bool operator==(const BeginGeneration&) const = default;
};
// The workers that are left are to be killed. Nothing follows.
struct EndJob {
  int code = 0;
  std::string why;
  bool operator==(const EndJob&) const = default;
};
using ElasticOrder =
    std::variant<StartWorker, EndWorker, AnnounceChange, EndGeneration, BeginGeneration, EndJob>;

}  // namespace sirtaki::launch
