// The files beside a checkpoint in which each rank saves the state of its shards, and how they are
// read. Of one rank; nothing here is collective.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <string>
#include <vector>

#include "core/base/rank_ranges.h"
#include "frameworks/torch/state/sharded_state.h"
#include "sirtaki/checkpoint.h"
#include "sirtaki/detail/gradient_reducer.h"

namespace sirtaki::detail {

// Returns the optimizer if it has sharded state, else null. It is the same on all ranks of the
// optimizer's process set, but not of the job.
GradientReducer* ShardedOf(torch::optim::Optimizer& optimizer);
bool HasShards(const CheckpointParts& parts);

// The files of a save have its number in their names, so that those of the save before stay until
// the new checkpoint has taken the place of the old one. What throws throws std::runtime_error,
// whose text names the file.
class ShardFiles {
 public:
  // `path`: of the checkpoint. `save`: empty: there are no files.
  ShardFiles(std::string path, std::string save, int ranks);

  const std::vector<std::string>& names() const { return names_; }  // by rank
  // Puts the shards of this rank, of the optimizers that rank 0 has as well, into an archive.
  void Save(const CheckpointParts& parts, torch::serialize::OutputArchive& archive) const;
  core::RankRanges Missing() const;  // the ranks whose files are not there
  void Remove(int rank) const;       // does not throw
  // The paths of the shards of other saves. Logs why if it cannot tell.
  std::vector<std::string> Others() const;

 private:
  const std::string path_;
  const std::string save_;
  std::vector<std::string> names_;
};

// Cuts the optimizer's parameters as a step does, and returns what this rank has of them.
std::vector<ShardOfParameter> CutAgain(GradientReducer& reducer,
                                       const torch::optim::Optimizer& optimizer);

// Takes the optimizer's state away. What it returns gives that back, and the options.
std::function<void()> SetAside(torch::optim::Optimizer& optimizer);

}  // namespace sirtaki::detail
