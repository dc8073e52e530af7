// The lanes queue groups of tensors, and process sets that come or go.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/rank_ranges.h"
#include "core/engine/executor.h"
#include "core/engine/work.h"
#include "ops/groups/group_task.h"

namespace sirtaki::ops {

// Never changed once queued.
struct SetChange {
  bool adds = false;
  core::SetNumber set = 0;
  core::RankRanges members;  // of a set that comes
  int rank = 0;              // this one
  core::WorkPtr work;        // null: this rank has joined
  core::TimePoint since{};

  // "adding process set 3 of ranks 0-2"
  std::string ToString() const;
};
using SetChangePtr = std::shared_ptr<const SetChange>;

// One of the two. Cheap to copy.
struct LaneTask {
  GroupTaskPtr group;
  SetChangePtr change;
  std::uint64_t number = 0;  // that the lane gives

  bool is_small() const { return group != nullptr && group->channel.lane == fusion::Lane::kSmall; }
  core::SetNumber set() const { return group != nullptr ? group->channel.set : change->set; }
  core::TimePoint since() const { return group != nullptr ? group->since : change->since; }
  std::string ToString() const { return group != nullptr ? group->ToString() : change->ToString(); }
  core::RunningOperation Running() const;
  void AddRunning(std::vector<core::RunningOperation>* list) const { list->push_back(Running()); }
  // The name of the tensor that a failure concerns; empty if there is none.
  std::string TensorName() const;
  void Complete(const core::Status& status) const;
  // "all-reduce of … (large lane): MPI_Allreduce: …", from this rank unless the backend knows
  // better.
  core::Status Describe(const core::Status& status) const;
};

}  // namespace sirtaki::ops
