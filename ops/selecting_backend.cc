#include "ops/selecting_backend.h"

namespace sirtaki::ops {

using core::Status;

SelectingBackend::SelectingBackend(Backend& flat, shm::Backend* local,
                                   const core::RankRanges& world)
    : flat_(flat), local_(local) {
  core::MutexLock lock(mutex_);
  const bool is_local = local_ != nullptr && local_->Covers(world);
  of_set_[core::kWorldSet] = is_local ? static_cast<Backend*>(local_) : &flat_;
}

Backend& SelectingBackend::For(Channel channel) const {
  core::MutexLock lock(mutex_);
  const auto found = of_set_.find(channel.set);
  return found == of_set_.end() ? flat_ : *found->second;
}

Status SelectingBackend::AddSet(core::SetNumber set, const core::RankRanges& members) {
  Status status = flat_.AddSet(set, members);
  const bool is_local = local_ != nullptr && local_->Covers(members);
  if (status.ok() && is_local) status = local_->AddSet(set, members);
  if (!status.ok()) return status;
  core::MutexLock lock(mutex_);
  of_set_[set] = is_local ? static_cast<Backend*>(local_) : &flat_;
  return status;
}

Status SelectingBackend::RemoveSet(core::SetNumber set) {
  const bool is_local = &For({set, fusion::Lane::kLarge}) != &flat_;
  Status status = is_local ? local_->RemoveSet(set) : Status::Ok();
  if (status.ok()) status = flat_.RemoveSet(set);
  core::MutexLock lock(mutex_);
  of_set_.erase(set);
  return status;
}

void SelectingBackend::Abort(const Status& why) {
  if (local_ != nullptr) local_->Abort(why);
  flat_.Abort(why);
}

}  // namespace sirtaki::ops
