// One collective of a test, as every rank sees it, and what it has to give: by naive loops over
// what all ranks have.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/engine/executor.h"
#include "core/protocol/request.h"
#include "ops/host/host_lanes.h"

namespace sirtaki::ops {

using Memory = std::vector<std::byte>;

struct RunCase {
  core::Signature signature;
  bool in_place = false;
  std::uint64_t seed = 0;
  std::vector<std::int64_t> rows = {};                 // by rank, of kinds that have them
  std::vector<std::vector<std::int64_t>> splits = {};  // by rank; empty: equal parts
  int absent = -1;                                     // the rank that has no gradient
  core::RankRanges joined = {};
  bool in_parts = false;  // each rank keeps a part of an all-reduce, and nobody needs the whole
  bool part_in_whole = false;            // and gets it where it lies in the output
  std::vector<std::int64_t> parts = {};  // the elements of each rank's part; empty: most are more

  bool Joined(int rank) const { return joined.Contains(rank); }
  // The rows that `from` gives to `to`, of kinds that have rows.
  std::int64_t RowsFromTo(int from, int to, int size) const;
  std::int64_t InputCount(int rank) const;
  std::int64_t OutputCount(int rank, int size) const;  // where no output is allocated on the way
  // The elements that each rank keeps, one after the other; most are more than those before, if
  // `parts` says nothing.
  core::PartCuts Cuts(int size) const;
  std::string ToString() const;
};

using Cases = std::vector<RunCase>;

// All that reduces, of a type and an operation, in many sizes.
Cases ReducingCases(core::ReduceOp op, core::DType dtype, int size);

// The cases of a kind whose first dimension may differ by rank. `root`: -1 where there is none.
Cases CasesWithRows(core::OpKind kind, core::DType dtype, int root, int size);

// Splits that are different for each pair, some of them 0, that use up the rows.
std::vector<std::int64_t> UnequalSplits(std::int64_t rows, int rank, int size);

// What a rank has before; every rank can make every rank's.
Memory InputOf(const RunCase& c, int rank);

// What a rank has afterwards; none: it gets no result, and its output stays as it was.
std::optional<Memory> ExpectedOf(const RunCase& c, int rank, int size);

// The rows that allocate_output is told.
std::vector<std::int64_t> ExpectedRows(const RunCase& c, int rank, int size);

// One rank's side of a case.
class RunSide {
 public:
  // The work keeps the memory, for it may be written to after a failure.
  core::RunItem MakeItem(const RunCase& c, const std::string& name, int rank, int size);
  const core::HandlePtr& handle() const { return handle_; }
  // Compares every byte, except of averages on GPUs, which may round the shares of the ranks.
  void Check(const RunCase& c, int rank, int size) const;
  bool has_part() const { return work_ && work_->kept && work_->kept->is_there; }
  Memory part() const;  // precondition: has_part()
  const Memory& result() const { return in_place_ ? memory_->input : memory_->output; }

 private:
  static constexpr std::size_t kGuard = 64;  // bytes behind the output that nobody may touch

  struct Tensors {
    Memory input;
    Memory output;
    Memory part;  // of in_parts
    bool allocated = false;
    std::vector<std::int64_t> seen_rows;
  };

  std::shared_ptr<Tensors> memory_ = std::make_shared<Tensors>();
  bool in_place_ = false;
  core::HandlePtr handle_;
  core::WorkPtr work_;
};

// An empty batch of ranks 0 to size - 1, whose limits send tensors of some hundred bytes to the large
// lane, in many windows.
core::RunBatch SmallBatch(int size, std::uint64_t number = 0);

// Drives lanes as the engine does, until everything is done.
void RunToIdle(HostLanes& lanes);

// Elements as doubles, of floating types.
std::vector<double> AsDoubles(core::DType dtype, const Memory& memory);

}  // namespace sirtaki::ops
