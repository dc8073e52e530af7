#include "ops/nccl/host_hierarchy.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "ops/base/bytes.h"
#include "ops/base/set_numbers.h"

namespace sirtaki::ops::nccl {
namespace {

using core::SetNumber;
using core::Status;
using cuda::CopyKind;

std::int64_t SliceBytes(const HostBounce& bounce) {
  const core::Signature& signature = *bounce.works.front()->request.signature;
  return signature.ElementCount() * BytesOf(signature.dtype);
}

}  // namespace

HostSlicesPtr SlicesOf(SetNumber set, const core::RankRanges& members, int rank,
                       const std::vector<int>& host_of_rank) {
  std::map<int, std::vector<int>> by_host;
  for (const int member : members.ToVector()) {
    by_host[host_of_rank[static_cast<std::size_t>(member)]].push_back(member);
  }
  const std::vector<int>& here = by_host[host_of_rank[static_cast<std::size_t>(rank)]];
  const bool alike = std::all_of(by_host.begin(), by_host.end(), [&here](const auto& host) {
    return host.second.size() == here.size();
  });
  if (by_host.size() < 2 || !alike || here.size() > kMaxSlices || set >= kMaxSetWithSlices)
    return nullptr;
  const auto slice = std::find(here.begin(), here.end(), rank) - here.begin();
  auto slices = std::make_shared<HostSlices>();
  for (const int member : here) slices->here.Add(member);
  for (const auto& [host, ranks] : by_host) {
    slices->carriers.Add(ranks[static_cast<std::size_t>(slice)]);
  }
  slices->set = SetBeside(SetKind::kDeviceSlice, set, static_cast<std::size_t>(slice));
  return slices;
}

bool GoesByHosts(const GroupTask& group) { return DescribeReduce(group).has_value(); }

std::shared_ptr<GroupTask> MakeSlicePart(const GroupTask& group, const HostSlices& slices,
                                         HostBouncePtr* bounce) {
  const ReducedInSlices reduced = *DescribeReduce(group);
  auto signature = std::make_shared<core::Signature>();
  signature->kind = core::OpKind::kAllReduce;
  signature->reduction = reduced.op;
  signature->dtype = reduced.moved;
  signature->shape = {reduced.SliceCount(slices.here.Count())};

  auto work = std::make_shared<core::Work>();
  work->request.key = group.items.front().key;
  work->request.signature = signature;
  work->handle = std::make_shared<core::HandleState>(nullptr, nullptr);

  auto part = std::make_shared<GroupTask>();
  part->channel = {slices.set, fusion::Lane::kLarge};
  part->members = slices.carriers;
  part->rank = group.rank;
  part->since = group.since;
  part->chunk_bytes = group.chunk_bytes;
  part->of_device = true;
  part->items.push_back({.key = work->request.key, .signature = signature, .work = work});
  *bounce = std::make_shared<HostBounce>();
  (*bounce)->works.push_back(std::move(work));
  (*bounce)->in_slices = true;
  part->inputs_there = (*bounce)->there;
  return part;
}

void Decline(HostBounce& bounce) {
  core::Work& work = *bounce.works.front();
  const auto memory =
      std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(SliceBytes(bounce)));
  work.input = work.output = memory->data();
  work.keep_alive = memory;
  bounce.there->store(true, std::memory_order_release);
}

Status SliceCrossing::Cross(std::byte* slice) {
  const std::int64_t bytes = SliceBytes(bounce_);
  void* memory = nullptr;
  Status status = context_.host.Reserve(bytes, &memory);
  if (status.ok()) status = Copy(context_, memory, slice, bytes, CopyKind::kDeviceToHost);
  if (status.ok()) status = AwaitStream(context_);
  if (!status.ok()) return status;
  bounce_.works.front()->input = bounce_.works.front()->output = memory;
  bounce_.there->store(true, std::memory_order_release);
  status = AwaitHost(context_, bounce_);
  if (status.ok()) status = Copy(context_, slice, memory, bytes, CopyKind::kHostToDevice);
  if (status.ok()) status = context_.events.Take(&back_);
  return status.ok() ? back_->Record(context_.stream.handle()) : status;
}

Status SliceCrossing::End() const {
  if (back_ == nullptr) return Status::Ok();
  return context_.await([this](bool* over) { return back_->Poll(over); });
}

}  // namespace sirtaki::ops::nccl
