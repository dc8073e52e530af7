// Random programs of collectives on random overlapping process sets, by seed: every member submits
// the named pieces of a set in an order of its own and the unnamed ones in the common order, then
// waits for all of them in another order. What each piece must give is computed by naive loops, and
// the order in which the ranks started their groups is written down. Free of LibTorch; for threads
// and for mpirun.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/engine/executor.h"
#include "core/engine/work.h"
#include "session/session.h"

namespace sirtaki::tests {

// One collective of one tensor, or one tensor of a grouped call. Elements are small integers, so
// that every type holds every result exactly.
struct RandomPiece {
  core::OpKind kind = core::OpKind::kAllReduce;
  core::ReduceOp op = core::ReduceOp::kSum;
  core::DType dtype = core::DType::kF32;
  std::size_t set = 0;  // index into RandomProgram::sets
  bool named = true;
  int root = -1;            // world rank
  std::int64_t width = 1;   // elements of a row
  std::int64_t rows = 1;    // where all ranks have as many
  std::uint64_t salt = 0;   // of its values and sizes
  std::size_t tensors = 1;  // more than one: a grouped call, of tensors of growing size
};

struct RandomProgram {
  explicit RandomProgram(std::uint64_t seed, int size_or_any = 0);

  // The rows that `rank` gives, where that differs; what it gives to `to`, of an all-to-all.
  std::int64_t RowsAt(const RandomPiece& piece, int rank) const;
  std::int64_t SplitOf(const RandomPiece& piece, int rank, int to) const;
  std::int64_t ValueAt(const RandomPiece& piece, std::size_t tensor, int rank,
                       std::int64_t index) const;

  int size = 2;
  std::vector<int> host_of_rank;
  std::int64_t small_bytes = 0;
  std::int64_t fusion_bytes = 0;
  // The world, then those that are added when the program begins; some are removed at its end.
  std::vector<core::RankRanges> sets;
  std::vector<bool> removed;
  std::vector<std::vector<RandomPiece>> steps;
};

// The groups that this rank has started, in order. Thread-safe as the engine calls it: under its
// token.
class StartedGroups {
 public:
  explicit StartedGroups(const RandomProgram& program) : program_(program) {}
  void Note(const core::RunBatch& batch);
  const std::vector<std::string>& names() const { return names_; }

 private:
  const RandomProgram& program_;
  std::vector<std::string> names_;
};

// Where the tensors of a rank are, if not on the host.
class RandomPlace {
 public:
  virtual ~RandomPlace() = default;
  // The work of a tensor there, with what its signature says of it.
  virtual core::WorkPtr MakeWork(core::Signature* signature) = 0;
  // The input, which is in its memory now, is made there.
  virtual void MakeInput(core::Work& work, std::vector<std::byte>& input) = 0;
  // Returns when the result is there. After the handle.
  virtual void AwaitResult(const core::Work& work) = 0;
};

// Runs the program on this rank of a session that was started with the program's limits. Returns
// what was wrong, or nothing. `place`: null for the host.
std::string RunRandomProgram(const RandomProgram& program, session::Session& session,
                             std::uint64_t seed, RandomPlace* place = nullptr);

}  // namespace sirtaki::tests
