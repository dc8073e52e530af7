// Runs the table's cases on one rank, by the public functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sirtaki/torch.h"
#include "tests/conformance/calls.h"
#include "tests/conformance/case_table.h"
#include "tests/conformance/reference.h"
#include "tests/conformance/tensors.h"

namespace sirtaki::tests::conformance {

// One rank's side of it; every rank of the session has one, and all of them are used alike. Reports
// by GoogleTest, with the case's whole name and the rank.
class CaseRunner {
 public:
  // Makes the process sets. Collective.
  CaseRunner();
  // What is told of each case before it runs, for watchdogs.
  void TellOfEach(std::function<void(const std::string&)> tell) { tell_ = std::move(tell); }

  // All cases of a collective: blocking forms one after the other, asynchronous ones many at a
  // time, waited for in another order on each rank; every second case has a name. `percent`: how
  // many of the problems; `seed` says which, the same on all ranks. Collective. Stops at a group's fault.
  void Run(Collective collective, int percent = 100, std::uint64_t seed = 0);

  // Removes the process sets. Collective.
  void RemoveSets();

  // The cases of the table, run or not because this rank is not in the set.
  std::int64_t cases() const { return cases_; }

 private:
  struct Attempt;  // one case under way

  void RunProblem(const Problem& problem, std::size_t index);
  void RunForm(const std::shared_ptr<Attempt>& attempt);
  void Finish(Attempt& attempt);
  void Judge(const Attempt& attempt, const Outcome& outcome);
  void JudgePart(const Attempt& attempt, const Outcome& outcome, std::size_t part);
  void FinishPending();
  // Calls it; of a case that must be refused an error is what is wanted, and false is returned.
  bool Succeeds(const Attempt& attempt, const std::function<void()>& call);
  void Fail(const Attempt& attempt, const std::string& why);

  const int rank_;
  std::vector<SetOfRanks> sets_;
  std::vector<ProcessSet> process_sets_;
  std::function<void(const std::string&)> tell_;
  std::vector<std::shared_ptr<Attempt>> pending_;
  std::int64_t cases_ = 0;
  int failures_ = 0;
  bool stopped_ = false;
};

}  // namespace sirtaki::tests::conformance
