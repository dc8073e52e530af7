#include "ops/host/host_lanes.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "ops/base/keep_forever.h"
#include "ops/host/host_lanes_impl.h"

namespace sirtaki::ops {

using core::Status;
using core::StatusCode;

namespace {

// How long the destructor waits for an aborted operation to return before its thread is left
// behind.
constexpr auto kGrace = std::chrono::seconds(1);

}  // namespace

HostLanes::HostLanes(HostLanesOptions options, Backends& backend)
    : impl_(std::make_shared<Impl>(std::move(options), backend)) {
  // The thread keeps what it uses, whatever becomes of this object.
  impl_->StartThread([impl = impl_] { impl->RunLargeLane(); });
}

HostLanes::~HostLanes() {
  if (!HostLanes::Idle() || impl_->messages.unfinished()) {
    HostLanes::Abandon(Status(StatusCode::kShutDown, "the session has ended"));
  }
  for (Impl::InFlight& one : impl_->small) {
    const GroupTaskPtr group = one.task.group;
    one.run->Drop();
    Impl::Keep(*group, std::make_shared<Impl::InFlight>(std::move(one)));
  }
  impl_->small.clear();
  const bool gone = impl_->EndThread(kGrace);
  if (std::shared_ptr<void> messages = impl_->messages.Release()) {
    KeepUntil(impl_->backend.WhenMessagesLetGo(), std::move(messages));
  }
  if (!gone) KeepForever(impl_);
}

void HostLanes::Start(core::RunBatch batch, core::TimePoint now) {
  const HostLanesOptions& options = impl_->options;
  StartGroups(MakeGroups(std::move(batch), options.deterministic, options.rank, now));
}

void HostLanes::StartGroups(std::vector<std::shared_ptr<GroupTask>> groups) {
  for (std::shared_ptr<GroupTask>& group : groups) {
    group->number = ++impl_->groups;
    group->route = impl_->backend.Select(group->channel);
    impl_->Enqueue({std::move(group), nullptr});
  }
  impl_->StepSmall();
}

void HostLanes::AddSet(core::SetNumber set, const core::RankRanges& members, core::WorkPtr work,
                       core::TimePoint now) {
  impl_->EnqueueChange({.adds = true,
                        .set = set,
                        .members = members,
                        .rank = impl_->options.rank,
                        .work = std::move(work),
                        .since = now});
}

void HostLanes::RemoveSet(core::SetNumber set, core::WorkPtr work, core::TimePoint now) {
  impl_->EnqueueChange({.adds = false,
                        .set = set,
                        .members = {},
                        .rank = impl_->options.rank,
                        .work = std::move(work),
                        .since = now});
}

void HostLanes::StartP2p(core::WorkPtr work, core::TimePoint now) {
  impl_->messages.Start(std::move(work), now);
}

void HostLanes::StartP2p(core::WorkPtr work, core::TimePoint now, P2pGate there,
                         std::shared_ptr<P2pCarrier> carrier) {
  impl_->messages.Start(std::move(work), now, std::move(there), std::move(carrier));
}

bool HostLanes::Step() {
  if (impl_->stopped()) return false;
  bool moved = impl_->StepSmall();
  moved |= impl_->StepP2p();
  return moved;
}

bool HostLanes::NeedsStepping() const {
  if (impl_->stopped()) return false;
  return !impl_->small.empty() || !impl_->small_queue.empty() || impl_->messages.unfinished();
}

bool HostLanes::NeedsPolling() const {
  if (impl_->stopped()) return false;
  const auto is_silent = [this](const Impl::InFlight& of) {
    const GroupTask& task = *of.run->task();
    return !task.route.backend->Rings(task.channel);
  };
  return impl_->messages.unfinished() ||
         std::any_of(impl_->small.begin(), impl_->small.end(), is_silent);
}

bool HostLanes::Idle() const {
  core::MutexLock lock(impl_->mutex);
  return impl_->unfinished.empty() && !impl_->large_runs;
}

std::vector<core::RunningOperation> HostLanes::Running() const {
  std::vector<core::RunningOperation> operations = impl_->messages.Running();
  const std::vector<core::RunningOperation> tasks = impl_->Running();
  operations.insert(operations.end(), tasks.begin(), tasks.end());
  std::stable_sort(operations.begin(), operations.end(),
                   [](const auto& a, const auto& b) { return a.since < b.since; });
  return operations;
}

void HostLanes::EndMessages(const Status& why) { impl_->messages.Stop(why); }

void HostLanes::Abandon(const Status& why) {
  impl_->Stop(why.ok() ? Status(StatusCode::kAborted, "abandoned") : why, std::nullopt);
}

}  // namespace sirtaki::ops
