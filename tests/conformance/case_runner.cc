#include "tests/conformance/case_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>

namespace sirtaki::tests::conformance {
namespace {

// Asynchronous cases under way at a time.
constexpr std::size_t kInFlight = 48;
constexpr int kMostFailuresShown = 20;
constexpr int kGroupSize = 2;

bool IsFault(ErrorCode code) {
  return code == ErrorCode::PeerLost || code == ErrorCode::TimedOut || code == ErrorCode::Aborted ||
         code == ErrorCode::Backend || code == ErrorCode::Protocol;
}

std::size_t IndexOf(int rank, const std::vector<int>& members) {
  const auto at = std::find(members.begin(), members.end(), rank);
  return static_cast<std::size_t>(at - members.begin());
}

}  // namespace

struct CaseRunner::Attempt {
  Problem problem;
  Form form = Form::kBlocking;
  std::string name;
  std::shared_ptr<const std::vector<Exercise>> exercises;  // shared by the forms of a problem
  std::size_t me = 0;
  std::vector<LaidOut> tensors;
  Arguments arguments;
  Started started;
};

CaseRunner::CaseRunner() : rank_(sirtaki::rank()), sets_(SetsOf(sirtaki::size())) {
  for (const SetOfRanks& set : sets_) {
    process_sets_.push_back(set.name == "world" ? ProcessSet() : add_process_set(set.members));
  }
  process_sets_.push_back(local_process_set());
  sets_.push_back({"local", process_sets_.back().ranks()});
}

void CaseRunner::RemoveSets() {
  if (stopped_) return;
  for (std::size_t i = 1; i + 1 < process_sets_.size(); ++i) {
    remove_process_set(process_sets_[i]);
  }
}

void CaseRunner::Run(Collective collective, int percent, std::uint64_t seed) {
  const std::vector<Problem> problems = ProblemsOf(collective, sets_.size());
  for (std::size_t i = 0; i < problems.size() && !stopped_; ++i) {
    // Spread over the table; each of 100 seeds begins elsewhere, so that samples in turn cover it all.
    if (static_cast<int>((i * 37 + seed % 100) % 100) < percent) RunProblem(problems[i], i);
  }
  FinishPending();
}

void CaseRunner::RunProblem(const Problem& problem, std::size_t index) {
  const SetOfRanks& set = sets_[problem.set];
  const std::vector<Form> forms = FormsOf(problem);
  cases_ += static_cast<std::int64_t>(forms.size());
  const std::size_t me = IndexOf(rank_, set.members);
  if (me == set.members.size()) return;
  const auto exercises = std::make_shared<std::vector<Exercise>>();
  for (int part = 0; part < kGroupSize; ++part) {
    exercises->push_back(MakeExercise(problem, part, set.members, me));
  }
  const std::string name = NameOf(problem, sets_);
  for (std::size_t f = 0; f < forms.size() && !stopped_; ++f) {
    const auto attempt = std::make_shared<Attempt>();
    attempt->problem = problem;
    attempt->form = forms[f];
    attempt->name = name + "/" + std::string(NameOf(forms[f]));
    attempt->exercises = exercises;
    attempt->me = me;
    // Blocking forms share a name, so that it comes again; those in flight together do not.
    if ((index + f) % 2 == 0) attempt->arguments.name = IsAsync(forms[f]) ? attempt->name : name;
    attempt->arguments.process_set = process_sets_[problem.set];
    if (HasRoot(problem.collective)) {
      attempt->arguments.root = set.members[RootOf(problem, set.members.size())];
    }
    if (problem.scaled) {
      attempt->arguments.prescale = kPrescale;
      attempt->arguments.postscale = kPostscale;
    }
    attempt->arguments.splits = (*exercises)[0].splits[me];
    RunForm(attempt);
  }
}

void CaseRunner::RunForm(const std::shared_ptr<Attempt>& attempt) {
  if (tell_) tell_(attempt->name);
  const std::size_t parts = IsGrouped(attempt->form) ? kGroupSize : 1;
  std::vector<at::Tensor> tensors;
  for (std::size_t part = 0; part < parts; ++part) {
    const Exercise& exercise = (*attempt->exercises)[part];
    attempt->tensors.push_back(MakeTensor(exercise.inputs[attempt->me], attempt->problem.shape));
    tensors.push_back(attempt->tensors.back().tensor);
  }
  const auto call = [&](auto function) {
    return function(attempt->problem, attempt->form, tensors, attempt->arguments);
  };
  if (IsAsync(attempt->form)) {
    if (!Succeeds(*attempt, [&] { attempt->started = call(CallAsync); })) return;
    pending_.push_back(attempt);
    if (pending_.size() >= kInFlight) FinishPending();
    return;
  }
  Outcome outcome;
  if (Succeeds(*attempt, [&] { outcome = call(CallAndWait); })) Judge(*attempt, outcome);
}

void CaseRunner::FinishPending() {
  std::mt19937 order(static_cast<std::mt19937::result_type>(rank_));
  std::shuffle(pending_.begin(), pending_.end(), order);
  for (const auto& attempt : pending_) {
    if (!stopped_) Finish(*attempt);
  }
  pending_.clear();
}

void CaseRunner::Finish(Attempt& attempt) {
  if (tell_) tell_("waiting for " + attempt.name);
  Outcome outcome;
  if (Succeeds(attempt, [&] { outcome = WaitFor(attempt.started); })) Judge(attempt, outcome);
}

bool CaseRunner::Succeeds(const Attempt& attempt, const std::function<void()>& call) {
  try {
    call();
    return true;
  } catch (const Error& error) {
    if (MustBeRefused(attempt.problem, attempt.form) && error.code() == ErrorCode::InvalidArgument)
      return false;
    Fail(attempt, std::string("threw ") + error_code_name(error.code()) + ": " + error.what());
    stopped_ = IsFault(error.code());
  }
  return false;
}

void CaseRunner::Judge(const Attempt& attempt, const Outcome& outcome) {
  if (MustBeRefused(attempt.problem, attempt.form)) return Fail(attempt, "was not refused");
  if (outcome.tensors.size() != attempt.tensors.size()) {
    return Fail(attempt, "gave " + std::to_string(outcome.tensors.size()) + " tensors");
  }
  for (std::size_t part = 0; part < attempt.tensors.size(); ++part) {
    JudgePart(attempt, outcome, part);
  }
}

void CaseRunner::JudgePart(const Attempt& attempt, const Outcome& outcome, std::size_t part) {
  const Exercise& exercise = (*attempt.exercises)[part];
  const LaidOut& given = attempt.tensors[part];
  const at::Tensor& got = outcome.tensors[part];
  const bool any_nan = Reduces(attempt.problem.collective) &&
                       core::IsFloating(core::PartType(attempt.problem.dtype));
  const auto check = [&](const std::string& what, const std::string& why) {
    if (!why.empty()) Fail(attempt, "tensor " + std::to_string(part) + what + ": " + why);
  };
  check("", WhyNotEqual(got, exercise.result, exercise.tolerance, any_nan));
  check("", WhyTouchedOutside(given, attempt.problem.shape));
  if (IsInPlace(attempt.form)) {
    if (!got.is_same(given.tensor)) check("", "what is returned is not the tensor that was given");
  } else {
    check(", the input", WhyNotEqual(given.tensor, exercise.inputs[attempt.me], 0, false));
    if (got.defined() && got.numel() > 0 && got.is_alias_of(given.tensor)) {
      check("", "the result shares memory with the input");
    }
  }
  if (outcome.received_splits.empty()) return;
  const std::vector<std::int64_t>& splits = outcome.received_splits[part];
  if (splits != exercise.received_splits) {
    check(", received splits", testing::PrintToString(splits) + ", not " +
                                   testing::PrintToString(exercise.received_splits));
  }
}

void CaseRunner::Fail(const Attempt& attempt, const std::string& why) {
  if (++failures_ > kMostFailuresShown) return;
  ADD_FAILURE() << attempt.name << (attempt.arguments.name.empty() ? " (unnamed)" : "")
                << " on rank " << rank_ << ": " << why
                << (failures_ == kMostFailuresShown ? "\n(no more is told of this rank)" : "");
}

}  // namespace sirtaki::tests::conformance
