#include "ops/groups/lane_task.h"

#include <utility>

#include "core/protocol/message.h"

namespace sirtaki::ops {

std::string SetChange::ToString() const {
  const std::string name = "process set " + std::to_string(set);
  return adds ? "adding " + name + " of ranks " + members.ToString() : "removing " + name;
}

std::string LaneTask::TensorName() const {
  return group != nullptr ? core::TensorName(group->key()) : std::string();
}

core::RunningOperation LaneTask::Running() const {
  core::RunningOperation operation{set(), ToString(), since(), {}};
  if (group != nullptr) operation.key = group->key();
  return operation;
}

void LaneTask::Complete(const core::Status& status) const {
  if (group != nullptr) return group->Complete(status);
  if (change->work == nullptr) return;
  if (status.ok()) change->work->handle->SetValue(change->set);
  change->work->handle->Complete(status);
}

core::Status LaneTask::Describe(const core::Status& status) const {
  core::Origin origin = status.origin();
  if (origin.rank < 0) origin.rank = group != nullptr ? group->rank : change->rank;
  if (origin.tensor.empty()) origin.tensor = TensorName();
  return {status.code(), ToString() + ": " + status.message(), std::move(origin)};
}

}  // namespace sirtaki::ops
