#include "ops/between_hosts/backend_selection.h"

namespace sirtaki::ops {

using core::Status;

BackendSelection::BackendSelection(Backend& flat, shm::Backend* local,
                                   const core::RankRanges& world, Hierarchy* hierarchy)
    : flat_(flat), local_(local), hierarchy_(hierarchy) {
  core::MutexLock lock(mutex_);
  const bool is_local = local_ != nullptr && local_->Covers(world);
  of_set_[core::kWorldSet] = is_local ? static_cast<Backend*>(local_) : &flat_;
}

Route BackendSelection::Select(Channel channel) {
  Route route{&flat_, &flat_};
  {
    core::MutexLock lock(mutex_);
    const auto found = of_set_.find(channel.set);
    if (found != of_set_.end()) route = {found->second, found->second};
  }
  if (hierarchy_ != nullptr && hierarchy_->Covers(channel)) route.rootless = hierarchy_;
  return route;
}

Status BackendSelection::AddSet(core::SetNumber set, const core::RankRanges& members) {
  Status status = flat_.AddSet(set, members);
  const bool is_local = local_ != nullptr && local_->Covers(members);
  if (status.ok() && is_local) status = local_->AddSet(set, members);
  if (status.ok() && hierarchy_ != nullptr) status = hierarchy_->AddSet(set, members);
  if (!status.ok()) return status;
  core::MutexLock lock(mutex_);
  of_set_[set] = is_local ? static_cast<Backend*>(local_) : &flat_;
  return status;
}

Status BackendSelection::RemoveSet(core::SetNumber set) {
  const bool is_local = Select({set, fusion::Lane::kLarge}).backend != &flat_;
  Status status = is_local ? local_->RemoveSet(set) : Status::Ok();
  if (status.ok() && hierarchy_ != nullptr) status = hierarchy_->RemoveSet(set);
  if (status.ok()) status = flat_.RemoveSet(set);
  core::MutexLock lock(mutex_);
  of_set_.erase(set);
  return status;
}

void BackendSelection::Abort(const Status& why) {
  if (hierarchy_ != nullptr) hierarchy_->Abort(why);
  if (local_ != nullptr) local_->Abort(why);
  flat_.Abort(why);
}

}  // namespace sirtaki::ops
