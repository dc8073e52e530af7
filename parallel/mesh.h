// The ranks of a job as a grid, whose axes are the ways in which a model and its data are divided.
// Pure: the same on every rank.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace sirtaki::parallel {

struct MeshDimension {
  std::string name;
  int size = 1;
};

// The ranks come host by host, and the last axis goes on first: ranks that are neighbours along it
// share a host as far as hosts have room. A row of an axis is the ranks that differ along that axis
// alone.
class MeshLayout {
 public:
  // A size of -1, which one axis may have, stands for what is left. `host_of_rank`: the number of each
  // rank's host. Fails with kInvalidArgument for a name that is empty or there twice, and if the
  // sizes do not come to the number of ranks.
  static core::Status Make(std::vector<MeshDimension> axes, const std::vector<int>& host_of_rank,
                           MeshLayout* layout);

  const std::vector<MeshDimension>& axes() const { return axes_; }

  // The number of an axis. Fails with kInvalidArgument and a text that names those that are there.
  core::Status Find(const std::string& name, std::size_t* axis) const;

  // The rows of an axis; the ranks of each in the order of their places along it.
  std::vector<std::vector<int>> RowsAlong(std::size_t axis) const;

 private:
  std::vector<MeshDimension> axes_;
  std::vector<int> ranks_;  // by place in the grid
};

}  // namespace sirtaki::parallel
