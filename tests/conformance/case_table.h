// The table of the conformance suite: what every backend must get right, at every number of ranks.
//
//   problem   collective × operation × dtype × shape class × process set
//   case      a problem × the form of the call
//
// The full product is taken, less what is not defined (core::IsDefined, collectives that have no
// reduction, forms that a collective does not come in). What is not defined for a dtype is a case
// too: it must be refused on every rank. Tensors of about 1 MiB are bounded by a rule: see
// IsInTable.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/types.h"

namespace sirtaki::tests::conformance {

enum class Collective : std::uint8_t {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kAllGatherInto,
  kGather,
  kScatter,
  kScatterSplits,
  kAllToAll,
  kAllToAllSplits,
};
inline constexpr int kCollectiveCount = 11;
std::string_view NameOf(Collective collective);  // "allreduce": the public function's
bool Reduces(Collective collective);
bool HasRoot(Collective collective);

enum class ShapeClass : std::uint8_t {
  kEmpty,
  kOne,
  kOdd,
  // Not contiguous:
  kTransposed,
  kStrided,   // every other column of a wider matrix
  kExpanded,  // one row, repeated with stride 0
  // Bytes, to within an element:
  kBelowMiB,
  kAboveMiB,
};
inline constexpr int kShapeClassCount = 8;
std::string_view NameOf(ShapeClass shape);
bool IsLarge(ShapeClass shape);

enum class Form : std::uint8_t {
  kBlocking,
  kAsync,
  kInPlace,
  kAsyncInPlace,
  kGrouped,
  kGroupedAsync,
  kGroupedInPlace,
};
inline constexpr int kFormCount = 7;
std::string_view NameOf(Form form);
bool IsInPlace(Form form);
bool IsGrouped(Form form);
bool IsAsync(Form form);

// A process set of the run. `name` is empty for the ones that are there from the start.
struct SetOfRanks {
  std::string name;          // "world", "local", "set{0,2}"
  std::vector<int> members;  // ascending world ranks; of local: this rank's
};

struct Problem {
  Collective collective = Collective::kAllReduce;
  core::ReduceOp op = core::ReduceOp::kSum;
  bool scaled = false;  // a factor before and one after: kPrescale, kPostscale
  core::DType dtype = core::DType::kF32;
  ShapeClass shape = ShapeClass::kOdd;
  std::size_t set = 0;   // among the run's
  bool refused = false;  // see MustBeRefused

  bool operator==(const Problem&) const = default;
};
// Powers of two and a small number: exact in every floating type.
inline constexpr double kPrescale = 0.5;
inline constexpr double kPostscale = 3.0;

// The process sets of a run on `size` ranks, without local: world, {0}, {last}, the even ones, all
// but rank 0, each once.
std::vector<SetOfRanks> SetsOf(int size);

// All problems of a collective, in an order that is the same on every rank. `sets`: how many the
// run has; the first is the world.
std::vector<Problem> ProblemsOf(Collective collective, std::size_t sets);
// The forms in which a problem is called.
std::vector<Form> FormsOf(const Problem& problem);

// Not defined, or in place where one memory stands for several elements: an InvalidArgument on
// every rank.
bool MustBeRefused(const Problem& problem, Form form);

// "reducescatter/average/bfloat16/odd/world".
std::string NameOf(const Problem& problem, const std::vector<SetOfRanks>& sets);

// Cases of one backend at `size` ranks, and at 1, 2, 3 and 4 together: the number in the README.
std::int64_t CountCases(int size);
std::int64_t CountAllCases();

}  // namespace sirtaki::tests::conformance
