#include "ops/groups/group_task.h"

#include <algorithm>
#include <utility>

namespace sirtaki::ops {

std::string GroupTask::ToString() const {
  std::string text(core::OpKindName(signature().kind));
  if (items.size() == 1) {
    text.append(" of ");
  } else {
    text.append(" of ").append(std::to_string(items.size())).append(" tensors from ");
  }
  text += key().ToString();
  if (signature().device == core::DeviceKind::kCuda) {
    return text + " (GPU slot " + std::to_string(signature().slot) + ")";
  }
  return text + (channel.lane == fusion::Lane::kSmall ? " (small lane)" : " (large lane)");
}

std::int64_t GroupTask::InputBytes() const {
  std::int64_t bytes = 0;
  for (const GroupItem& item : items) {
    if (item.work != nullptr) bytes += core::InputBytesOf(*item.signature, *item.work);
  }
  return bytes;
}

void GroupTask::Complete(const core::Status& status) const {
  for (const Call& call : calls) {
    if (call.handle != nullptr) call.handle->EndPiece(status);
  }
}

namespace {

// Adds a tensor of the batch, whose single tensors are in no other group.
void AddItem(core::RunItem& of, std::size_t part, bool is_first, GroupTask* group) {
  const bool is_single = of.signature->parts.empty();
  if (is_first) {
    core::HandlePtr handle = of.work != nullptr ? of.work->handle : nullptr;
    if (!is_single && handle != nullptr) handle->AddPiece();
    group->calls.push_back({is_single ? std::move(of.key) : of.key, std::move(handle)});
  }
  const std::size_t call = group->calls.size() - 1;
  if (is_single) {
    group->items.push_back({std::move(of.signature), std::move(of.work), call});
  } else {
    group->items.push_back(
        {of.signature->parts[part], of.work != nullptr ? of.work->parts[part] : nullptr, call});
  }
}

}  // namespace

std::vector<std::shared_ptr<GroupTask>> MakeGroups(core::RunBatch batch, bool deterministic,
                                                   int rank, core::TimePoint now) {
  const std::vector<fusion::Group> plan = fusion::Plan(batch, deterministic);
  std::vector<std::shared_ptr<GroupTask>> groups;
  groups.reserve(plan.size());
  for (const fusion::Group& planned : plan) {
    auto group = std::make_shared<GroupTask>();
    const fusion::Place first = planned.places.front();
    const bool on_device = fusion::SignatureAt(batch, first).device != core::DeviceKind::kHost;
    group->channel = {batch.set, on_device ? fusion::Lane::kLarge : planned.lane};
    group->members = batch.members;
    group->rank = rank;
    group->silent = batch.items[first.item].silent;
    group->since = now;
    group->limits = batch.limits;
    group->items.reserve(planned.places.size());
    group->calls.reserve(std::min(planned.places.size(), batch.items.size()));
    std::size_t last = batch.items.size();
    for (const fusion::Place place : planned.places) {
      AddItem(batch.items[place.item], place.part, place.item != last, group.get());
      last = place.item;
    }
    groups.push_back(std::move(group));
  }
  // A single tensor has gone into its group with the piece that its handle begins with. The others'
  // handles have a piece for each of their groups, perhaps none, beside that.
  for (const core::RunItem& item : batch.items) {
    if (item.work != nullptr) item.work->handle->EndPiece(core::Status::Ok());
  }
  return groups;
}

}  // namespace sirtaki::ops
