#include "sirtaki/mesh.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "frameworks/torch/calls/agreement.h"
#include "frameworks/torch/calls/tensor_call.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/tensors/throw.h"
#include "parallel/mesh.h"

namespace sirtaki {
namespace detail {

struct MeshRows {
  // An axis, as this rank sees it.
  struct Axis {
    std::vector<ProcessSet> sets;
    ProcessSet own;
    std::vector<int> ranks;
    int coordinate = 0;
  };

  parallel::MeshLayout layout;
  std::vector<MeshAxis> axes;
  std::vector<Axis> of_axis;

  std::size_t Find(const std::string& name) const {
    std::size_t axis = 0;
    ThrowIfError(layout.Find(name, &axis));
    return axis;
  }
  const Axis& Of(const std::string& name) const { return of_axis[Find(name)]; }
};

namespace {

MeshRows::Axis AddSets(const parallel::MeshLayout& layout, std::size_t axis, int rank,
                       const ProcessSetOptions& options) {
  MeshRows::Axis made;
  for (std::vector<int>& row : layout.RowsAlong(axis)) {
    made.sets.push_back(add_process_set(row, options));
    const auto own = std::find(row.begin(), row.end(), rank);
    if (own == row.end()) continue;
    made.own = made.sets.back();
    made.coordinate = static_cast<int>(own - row.begin());
    made.ranks = std::move(row);
  }
  return made;
}

}  // namespace
}  // namespace detail

const std::vector<MeshAxis>& Mesh::axes() const { return rows_->axes; }

int Mesh::size(const std::string& axis) const { return rows_->axes[rows_->Find(axis)].size; }

int Mesh::coordinate(const std::string& axis) const { return rows_->Of(axis).coordinate; }

const std::vector<int>& Mesh::ranks(const std::string& axis) const { return rows_->Of(axis).ranks; }

const ProcessSet& Mesh::set(const std::string& axis) const { return rows_->Of(axis).own; }

const std::vector<ProcessSet>& Mesh::sets(const std::string& axis) const {
  return rows_->Of(axis).sets;
}

Mesh mesh(const std::vector<MeshAxis>& axes, const ProcessSetOptions& options) {
  const auto session = detail::AliveSession();
  const session::Topology& topology = session->topology();
  std::vector<parallel::MeshDimension> given;
  std::vector<std::string> texts;
  for (const MeshAxis& axis : axes) {
    given.push_back({axis.name, axis.size});
    texts.push_back("axis \"" + axis.name + "\" of size " + std::to_string(axis.size));
  }
  auto rows = std::make_shared<detail::MeshRows>();
  const core::Status laid_out =
      parallel::MeshLayout::Make(std::move(given), topology.host_of_rank, &rows->layout);
  detail::AgreeOnList("the axes of mesh()", texts, laid_out.message(), session, options.timeout());
  for (std::size_t axis = 0; axis < rows->layout.axes().size(); ++axis) {
    const parallel::MeshDimension& dimension = rows->layout.axes()[axis];
    rows->axes.push_back({dimension.name, dimension.size});
    rows->of_axis.push_back(detail::AddSets(rows->layout, axis, topology.rank, options));
  }
  return Mesh(std::move(rows));
}

}  // namespace sirtaki
