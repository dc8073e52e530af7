#include "tests/conformance/case_table.h"

#include <algorithm>

namespace sirtaki::tests::conformance {
namespace {

using core::DType;

// Every operation that an all-reduce, a reduce and a reduce-scatter take.
bool HasOperation(Collective collective, core::ReduceOp op) {
  switch (op) {
    case core::ReduceOp::kSum:
    case core::ReduceOp::kAverage:
    case core::ReduceOp::kMin:
    case core::ReduceOp::kMax:
      return true;
    case core::ReduceOp::kProduct:
    case core::ReduceOp::kBitAnd:
    case core::ReduceOp::kBitOr:
    case core::ReduceOp::kBitXor:
      return collective != Collective::kReduceScatter;
    case core::ReduceOp::kAdasum:
      return collective == Collective::kAllReduce;
  }
  return false;
}

// One dtype of each width: a movement sees nothing of a type but its width.
bool StandsForItsWidth(DType dtype) {
  return dtype == DType::kU8 || dtype == DType::kF16 || dtype == DType::kF32 ||
         dtype == DType::kF64 || dtype == DType::kC128;
}

// The rule for tensors of about 1 MiB, which take a thousand times as long as small ones: on the
// world; of reductions every dtype with the first operation that it has (sum; of bool minimum) and
// every operation with float32 and int32; of movements one dtype of each width.
bool IsInTable(const Problem& problem) {
  if (!IsLarge(problem.shape)) return true;
  if (problem.set != 0) return false;
  if (!Reduces(problem.collective)) return StandsForItsWidth(problem.dtype);
  const auto first = problem.dtype == DType::kBool ? core::ReduceOp::kMin : core::ReduceOp::kSum;
  return problem.op == first || problem.dtype == DType::kF32 || problem.dtype == DType::kI32;
}

void AddShapesAndSets(Problem problem, std::size_t sets, std::vector<Problem>* problems) {
  for (int shape = 0; shape < kShapeClassCount; ++shape) {
    problem.shape = static_cast<ShapeClass>(shape);
    for (problem.set = 0; problem.set < sets; ++problem.set) {
      if (IsInTable(problem)) problems->push_back(problem);
    }
  }
}

// What is refused is refused whatever the shape: once on the world.
void AddRefused(Problem problem, std::vector<Problem>* problems) {
  problem.refused = true;
  problems->push_back(problem);
}

void AddOperation(Problem problem, std::size_t sets, std::vector<Problem>* problems) {
  if (!HasOperation(problem.collective, problem.op) ||
      !core::IsDefined(problem.op, problem.dtype)) {
    return AddRefused(problem, problems);
  }
  AddShapesAndSets(problem, sets, problems);
  if (problem.op != core::ReduceOp::kSum) return;
  problem.scaled = true;
  if (core::IsComplex(problem.dtype)) return AddRefused(problem, problems);
  AddShapesAndSets(problem, sets, problems);
}

}  // namespace

std::string_view NameOf(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return "allreduce";
    case Collective::kReduce:
      return "reduce";
    case Collective::kReduceScatter:
      return "reducescatter";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kAllGather:
      return "allgather";
    case Collective::kAllGatherInto:
      return "allgather_into";
    case Collective::kGather:
      return "gather";
    case Collective::kScatter:
      return "scatter";
    case Collective::kScatterSplits:
      return "scatter_splits";
    case Collective::kAllToAll:
      return "alltoall";
    case Collective::kAllToAllSplits:
      return "alltoall_splits";
  }
  return "unknown";
}

bool Reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduce ||
         collective == Collective::kReduceScatter;
}

bool HasRoot(Collective collective) {
  return collective == Collective::kReduce || collective == Collective::kBroadcast ||
         collective == Collective::kGather || collective == Collective::kScatter ||
         collective == Collective::kScatterSplits;
}

std::string_view NameOf(ShapeClass shape) {
  switch (shape) {
    case ShapeClass::kEmpty:
      return "empty";
    case ShapeClass::kOne:
      return "one";
    case ShapeClass::kOdd:
      return "odd";
    case ShapeClass::kTransposed:
      return "transposed";
    case ShapeClass::kStrided:
      return "strided";
    case ShapeClass::kExpanded:
      return "expanded";
    case ShapeClass::kBelowMiB:
      return "below_1MiB";
    case ShapeClass::kAboveMiB:
      return "above_1MiB";
  }
  return "unknown";
}

bool IsLarge(ShapeClass shape) {
  return shape == ShapeClass::kBelowMiB || shape == ShapeClass::kAboveMiB;
}

std::string_view NameOf(Form form) {
  switch (form) {
    case Form::kBlocking:
      return "blocking";
    case Form::kAsync:
      return "async";
    case Form::kInPlace:
      return "in_place";
    case Form::kAsyncInPlace:
      return "async_in_place";
    case Form::kGrouped:
      return "grouped";
    case Form::kGroupedAsync:
      return "grouped_async";
    case Form::kGroupedInPlace:
      return "grouped_in_place";
  }
  return "unknown";
}

bool IsInPlace(Form form) {
  return form == Form::kInPlace || form == Form::kAsyncInPlace || form == Form::kGroupedInPlace;
}

bool IsGrouped(Form form) {
  return form == Form::kGrouped || form == Form::kGroupedAsync || form == Form::kGroupedInPlace;
}

bool IsAsync(Form form) {
  return form == Form::kAsync || form == Form::kAsyncInPlace || form == Form::kGroupedAsync;
}

std::vector<SetOfRanks> SetsOf(int size) {
  std::vector<int> world;
  std::vector<int> even;
  for (int rank = 0; rank < size; ++rank) {
    world.push_back(rank);
    if (rank % 2 == 0) even.push_back(rank);
  }
  const std::vector<int> not_first(world.begin() + 1, world.end());
  std::vector<SetOfRanks> sets = {{"world", world}};
  for (const auto& members : {std::vector<int>{0}, {size - 1}, even, not_first}) {
    const bool known = std::any_of(sets.begin(), sets.end(),
                                   [&](const SetOfRanks& set) { return set.members == members; });
    if (members.empty() || known) continue;
    std::string name;
    for (int member : members) name += (name.empty() ? "set{" : ",") + std::to_string(member);
    sets.push_back({name + "}", members});
  }
  return sets;
}

std::vector<Problem> ProblemsOf(Collective collective, std::size_t sets) {
  std::vector<Problem> problems;
  for (int dtype = 0; dtype < core::kDTypeCount; ++dtype) {
    Problem problem;
    problem.collective = collective;
    problem.dtype = static_cast<DType>(dtype);
    if (!Reduces(collective)) {
      AddShapesAndSets(problem, sets, &problems);
      continue;
    }
    for (int op = 0; op < core::kReduceOpCount; ++op) {
      problem.op = static_cast<core::ReduceOp>(op);
      AddOperation(problem, sets, &problems);
    }
  }
  return problems;
}

std::vector<Form> FormsOf(const Problem& problem) {
  const bool in_place = problem.collective == Collective::kAllReduce ||
                        problem.collective == Collective::kBroadcast ||
                        problem.collective == Collective::kReduce;
  std::vector<Form> forms;
  for (int i = 0; i < kFormCount; ++i) {
    const auto form = static_cast<Form>(i);
    if (IsInPlace(form) && !in_place) continue;
    if (IsLarge(problem.shape) && (form == Form::kAsyncInPlace || form == Form::kGroupedAsync ||
                                   form == Form::kGroupedInPlace)) {
      continue;
    }
    forms.push_back(form);
  }
  return forms;
}

bool MustBeRefused(const Problem& problem, Form form) {
  return problem.refused || (IsInPlace(form) && problem.shape == ShapeClass::kExpanded);
}

std::string NameOf(const Problem& problem, const std::vector<SetOfRanks>& sets) {
  std::string name(NameOf(problem.collective));
  if (Reduces(problem.collective)) {
    name.append(problem.scaled ? "/scaled " : "/").append(core::ReduceOpName(problem.op));
  }
  name.append("/").append(core::DTypeName(problem.dtype));
  name.append("/").append(NameOf(problem.shape));
  name.append("/").append(sets[problem.set].name);
  return problem.refused ? name + "/refused" : name;
}

std::int64_t CountCases(int size) {
  const std::size_t sets = SetsOf(size).size() + 1;  // and local
  std::int64_t count = 0;
  for (int collective = 0; collective < kCollectiveCount; ++collective) {
    for (const Problem& problem : ProblemsOf(static_cast<Collective>(collective), sets)) {
      count += static_cast<std::int64_t>(FormsOf(problem).size());
    }
  }
  return count;
}

std::int64_t CountAllCases() {
  return CountCases(1) + CountCases(2) + CountCases(3) + CountCases(4);
}

}  // namespace sirtaki::tests::conformance
