// A mesh arranges the ranks of the job in a grid: along one axis they have different data, along
// another one different stages or parts of a model.
//
//   const auto mesh = sirtaki::mesh({{"data", 2}, {"pipe", 2}, {"tensor", 1}});
//   const int stage = mesh.coordinate("pipe");
//   auto optimizer = sirtaki::DistributedOptimizer(
//       std::move(sgd), parameters,
//       sirtaki::DistributedOptimizerOptions().process_set(mesh.set("data")));
//
// A row of an axis is the ranks that differ along that axis alone; it is a process set.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/process_set.h"

namespace sirtaki {

namespace detail {
struct MeshRows;
}

struct MeshAxis {
  std::string name;
  int size = 1;  // -1: what the other axes leave; one axis may have that
};

// A Mesh is a cheap, copyable reference. Its functions throw InvalidArgument for an axis that is not
// there; none is collective. The sets end as those of add_process_set do: with shutdown(), or by
// remove_process_set of each of sets(axis) on all ranks.
class SIRTAKI_API Mesh {
 public:
  explicit Mesh(std::shared_ptr<const detail::MeshRows> rows) : rows_(std::move(rows)) {}

  const std::vector<MeshAxis>& axes() const;
  int size(const std::string& axis) const;
  int coordinate(const std::string& axis) const;  // of this rank, 0 <= coordinate < size

  // The ranks of this rank's row, by their coordinates: ranks("pipe")[0] has the first stage. On
  // several hosts their order may be another one than in the set, which has its ranks ascending.
  const std::vector<int>& ranks(const std::string& axis) const;
  const ProcessSet& set(const std::string& axis) const;                // of this rank's row
  const std::vector<ProcessSet>& sets(const std::string& axis) const;  // of all rows

 private:
  std::shared_ptr<const detail::MeshRows> rows_;
};

// Makes a mesh of all ranks of the job, and a process set of each row of each axis. The ranks come
// host by host and the coordinate of the last axis changes first: so give last the axis that
// communicates most, whose rows then lie within a host as far as they fit. Collective. Throws on
// every rank: InvalidArgument if the sizes do not multiply to the number of ranks or a name is there
// twice, Mismatch if the ranks give different axes. `options`: of each set that is made.
SIRTAKI_API Mesh mesh(const std::vector<MeshAxis>& axes, const ProcessSetOptions& options = {});

}  // namespace sirtaki
