#include "parallel/mesh.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/text.h"
#include "parallel/choice.h"

namespace sirtaki::parallel {
namespace {

core::Status WrongMesh(const std::vector<MeshDimension>& axes, const std::string& why) {
  std::string text = "a mesh of";
  for (const MeshDimension& axis : axes) {
    text += (&axis == &axes.front() ? " " : " x ") + core::Quoted(axis.name) + " " +
            std::to_string(axis.size);
  }
  return {core::StatusCode::kInvalidArgument,
          (axes.empty() ? text + " no axes" : text) + " " + why};
}

}  // namespace

core::Status MeshLayout::Make(std::vector<MeshDimension> axes, const std::vector<int>& host_of_rank,
                              MeshLayout* layout) {
  const auto ranks = static_cast<std::int64_t>(host_of_rank.size());
  MeshDimension* open = nullptr;
  std::set<std::string> names;
  std::int64_t product = 1;
  for (MeshDimension& axis : axes) {
    if (axis.name.empty() || !names.insert(axis.name).second) {
      return WrongMesh(axes, "needs a name of its own for each axis");
    }
    if (axis.size == -1 && open == nullptr) {
      open = &axis;
    } else if (axis.size < 1 || axis.size > ranks) {
      return WrongMesh(axes, "needs sizes of 1 to " + std::to_string(ranks) +
                                 ", the ranks of the job, and -1 at most once for what is left");
    } else {
      product = std::min(product * axis.size, ranks + 1);  // above is wrong, however far
    }
  }
  if (axes.empty() || ranks % product != 0 || (open == nullptr && product != ranks)) {
    return WrongMesh(axes, "does not fit the job: its sizes have to multiply to " +
                               std::to_string(ranks) + ", the number of ranks");
  }
  if (open != nullptr) open->size = static_cast<int>(ranks / product);
  layout->axes_ = std::move(axes);
  layout->ranks_.resize(host_of_rank.size());
  std::iota(layout->ranks_.begin(), layout->ranks_.end(), 0);
  std::stable_sort(layout->ranks_.begin(), layout->ranks_.end(), [&](int a, int b) {
    return host_of_rank[static_cast<std::size_t>(a)] < host_of_rank[static_cast<std::size_t>(b)];
  });
  return core::Status::Ok();
}

core::Status MeshLayout::Find(const std::string& name, std::size_t* axis) const {
  std::vector<std::string_view> names;
  for (const MeshDimension& one : axes_) names.emplace_back(one.name);
  return FindChoice(name, "axis of the mesh", names, axis);
}

std::vector<std::vector<int>> MeshLayout::RowsAlong(std::size_t axis) const {
  std::size_t stride = 1;  // between neighbours along the axis
  for (std::size_t i = axis + 1; i < axes_.size(); ++i) {
    stride *= static_cast<std::size_t>(axes_[i].size);
  }
  const auto length = static_cast<std::size_t>(axes_[axis].size);
  std::vector<std::vector<int>> rows;
  for (std::size_t place = 0; place < ranks_.size(); ++place) {
    if (place / stride % length != 0) continue;  // not the first of its row
    std::vector<int>& row = rows.emplace_back();
    for (std::size_t i = 0; i < length; ++i) row.push_back(ranks_[place + i * stride]);
  }
  return rows;
}

}  // namespace sirtaki::parallel
