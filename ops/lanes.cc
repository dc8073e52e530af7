#include "ops/lanes.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/log.h"
#include "ops/cuda/device_work.h"
#include "ops/cuda/kernels.h"
#include "ops/nccl/host_bounce.h"

namespace sirtaki::ops {

using core::Status;
using core::StatusCode;

namespace {

// Whether only the members know the rows.
bool TellsRows(core::OpKind kind) {
  return kind == core::OpKind::kAllGather || kind == core::OpKind::kGather ||
         kind == core::OpKind::kScatter || kind == core::OpKind::kAllToAll;
}

// What each member of a device's group gives to the others through the host.
core::WorkPtr HostWork(const GroupTask& group, core::OpKind kind, core::DType dtype,
                       std::size_t count, std::string name) {
  auto signature = std::make_shared<core::Signature>();
  signature->kind = kind;
  signature->dtype = dtype;
  signature->shape = {static_cast<std::int64_t>(count)};
  auto work = std::make_shared<core::Work>();
  work->request.key = core::Key::Named(group.channel.set, std::move(name));
  work->request.asked = std::move(signature);
  return work;
}

}  // namespace

// Thread-safe.
class Lanes::Nccl {
 public:
  explicit Nccl(std::function<Status(nccl::Library*)> load) : load_(std::move(load)) {}

  // This rank says this before communicators are made. `first`: it makes the id.
  nccl::Introduction Introduce(bool first) SIRTAKI_EXCLUDES(mutex_) {
    core::MutexLock lock(mutex_);
    if (!status_) {
      status_ = load_(&library_);
      if (status_->ok()) {
        SIRTAKI_LOG(kInfo, "opened NCCL " << nccl::VersionText(library_.version) << " in "
                                          << library_.path);
      }
    }
    nccl::UniqueId id;
    Status status = *status_;
    if (status.ok() && first) {
      status = nccl::Check(library_.api, library_.api.GetUniqueId(&id), "ncclGetUniqueId", nullptr);
    }
    return status.ok() ? nccl::Introduction::Of(library_.version, id)
                       : nccl::Introduction::Failure(status);
  }

  // Filled in once a rendezvous has gone well. Whoever has it may outlive the lanes: a thread that
  // they leave behind goes on calling.
  static std::shared_ptr<const nccl::Api> ApiOf(const std::shared_ptr<Nccl>& nccl) {
    return {nccl, &nccl->library_.api};
  }

 private:
  const std::function<Status(nccl::Library*)> load_;
  core::Mutex mutex_;
  std::optional<Status> status_ SIRTAKI_GUARDED_BY(mutex_);
  nccl::Library library_;  // written once, before the first word of this rank
};

Lanes::Lanes(LanesOptions options, Backends& backend)
    : options_(std::move(options)),
      nccl_(std::make_shared<Nccl>(options_.load_nccl)),
      communicators_(std::make_shared<nccl::ProcessCommunicators>(Nccl::ApiOf(nccl_))),
      host_(std::make_unique<HostLanes>(options_.host, backend)) {}

Lanes::~Lanes() = default;

void Lanes::Start(core::RunBatch batch, core::TimePoint now) {
  const HostLanesOptions& options = options_.host;
  std::vector<std::shared_ptr<GroupTask>> groups =
      MakeGroups(std::move(batch), options.deterministic, options.rank, now);
  std::vector<std::shared_ptr<GroupTask>> on_devices;
  for (std::shared_ptr<GroupTask>& group : groups) {
    if (group->is_on_device()) on_devices.push_back(std::move(group));
  }
  if (!on_devices.empty()) std::erase(groups, nullptr);
  host_->StartGroups(std::move(groups));
  for (std::shared_ptr<GroupTask>& group : on_devices) StartOnDevice(std::move(group));
}

void Lanes::StartOnDevice(std::shared_ptr<GroupTask> group) {
  group->number = ++groups_;
  nccl::DeviceLane* const lane = LaneOf(*group);
  if (group->signature().reduction == core::ReduceOp::kAdasum) {
    nccl::HostBouncePtr bounce;
    host_->StartGroups({nccl::MakeHostPart(*group, &bounce)});
    if (bounce != nullptr) lane->StartBounce(std::move(group), std::move(bounce));
    return;
  }
  const auto [met, is_first] = met_.try_emplace({group->channel.set, group->signature().slot});
  if (is_first) met->second = Meet(*group, lane != nullptr);
  nccl::ToldRowsPtr rows = TellsRows(group->signature().kind) ? TellRows(group) : nullptr;
  if (lane != nullptr) {
    lane->Start(std::move(group), std::exchange(met->second, nullptr), std::move(rows));
  }
}

nccl::DeviceLane* Lanes::LaneOf(const GroupTask& group) {
  const Slot slot = group.signature().slot;
  core::MutexLock lock(mutex_);
  std::unique_ptr<nccl::DeviceLane>& lane = devices_[slot];
  if (lane == nullptr && !group.joined()) {
    const auto& device = cuda::AsDeviceWork(*group.items.front().work).device;
    driver_ = cuda::Kernels::CheckDriver(device->api(), options_.kernels_toolkit);
    lane = std::make_unique<nccl::DeviceLane>(nccl::DeviceLaneOptions{
        .device = device,
        .communicators = communicators_,
        .kernels = driver_.ok() ? options_.kernels : nullptr,
        .limit = options_.nccl_limit,
        .registers_arenas = options_.registers_arenas,
        .direct = options_.nccl_direct,
        .max_ctas = options_.nccl_max_ctas,
        .cta_policy = options_.nccl_cta_policy,
        .on_failure = options_.host.on_failure,
        .on_progress = options_.host.on_progress,
        .observer = options_.host.observer,
    });
  }
  return lane.get();
}

nccl::RendezvousPtr Lanes::Meet(const GroupTask& group, bool has_device) {
  auto rendezvous = std::make_shared<nccl::Rendezvous>();
  rendezvous->told = std::make_shared<core::HandleState>();
  Status failure;
  if (!has_device) {
    failure = {StatusCode::kUnsupported,
               "it joined before it had used a GPU, so nobody knows which GPU is its own"};
  } else if (options_.kernels == nullptr) {
    failure = {StatusCode::kUnsupported, options_.why_no_kernels};
  } else if (lacks_sharing()) {
    failure = {
        StatusCode::kUnsupported,
        "NCCL_COMM_SPLIT_SHARE_RESOURCES=0 keeps communicators from sharing what nccl_direct "
        "needs; unset it, or set SIRTAKI_NCCL_DIRECT=0"};
  } else {
    failure = driver_;
  }

  core::WorkPtr work =
      HostWork(group, core::OpKind::kAllGather, core::DType::kU8, sizeof(nccl::Introduction),
               "#communicator of GPU slot " + std::to_string(group.signature().slot));
  work->rows = 1;
  work->input = &rendezvous->own;
  // The lane reads the input after this; opening NCCL takes a while, which is the lane's to spend.
  work->allocate_output = [rendezvous, failure, nccl = nccl_, members = group.members->Count(),
                           first = group.members->IndexOf(group.rank) ==
                                   0](const std::vector<std::int64_t>& /*rows*/) -> void* {
    rendezvous->own = failure.ok() ? nccl->Introduce(first) : nccl::Introduction::Failure(failure);
    rendezvous->all.resize(static_cast<std::size_t>(members));
    return rendezvous->all.data();
  };
  work->handle = rendezvous->told;
  work->keep_alive = rendezvous;
  StartHostPart(group, std::move(work));
  return rendezvous;
}

nccl::ToldRowsPtr Lanes::TellRows(const std::shared_ptr<GroupTask>& group) {
  auto rows = std::make_shared<nccl::ToldRows>(group);
  core::WorkPtr work = HostWork(*group, core::OpKind::kAllGatherInto, core::DType::kI64,
                                rows->exchange.own().size(), "#rows of " + group->key().ToString());
  work->input = rows->exchange.own().data();
  work->output = rows->all.data();
  work->handle = rows->told;
  work->keep_alive = rows;
  StartHostPart(*group, std::move(work));
  return rows;
}

void Lanes::StartHostPart(const GroupTask& group, core::WorkPtr work) {
  core::RunBatch batch;
  batch.set = group.channel.set;
  batch.members = group.members;
  batch.limits = group.limits;
  const core::SignaturePtr signature = work->request.signature();
  batch.items.push_back({{.key = work->request.key, .signature = signature}, std::move(work)});
  const HostLanesOptions& options = options_.host;
  auto parts = MakeGroups(std::move(batch), options.deterministic, options.rank, group.since);
  for (const std::shared_ptr<GroupTask>& part : parts) part->of_device = true;
  host_->StartGroups(std::move(parts));
}

void Lanes::AddSet(core::SetNumber set, const core::RankRanges& members, core::WorkPtr work,
                   core::TimePoint now) {
  host_->AddSet(set, members, std::move(work), now);
}

void Lanes::RemoveSet(core::SetNumber set, core::WorkPtr work, core::TimePoint now) {
  std::erase_if(met_, [set](const auto& met) { return met.first.first == set; });
  for (nccl::DeviceLane* lane : DeviceLanes()) lane->RemoveSet(set);
  host_->RemoveSet(set, std::move(work), now);
}

void Lanes::StartP2p(core::WorkPtr work, core::TimePoint now) {
  if (work->request.signature()->device == core::DeviceKind::kHost) {
    return host_->StartP2p(std::move(work), now);
  }
  nccl::DeviceP2p& p2p = DeviceP2pOf(cuda::AsDeviceWork(*work).device);
  nccl::DeviceP2p::HostPart part = p2p.Start(std::move(work), now);
  if (part.work == nullptr) return;
  host_->StartP2p(std::move(part.work), now, std::move(part.there), std::move(part.carrier));
}

nccl::DeviceP2p& Lanes::DeviceP2pOf(const std::shared_ptr<cuda::Device>& device) {
  core::MutexLock lock(mutex_);
  // The pairs are those of two ranks: of their first GPUs.
  const bool is_first = device_p2ps_.empty();
  std::unique_ptr<nccl::DeviceP2p>& p2p = device_p2ps_[device.get()];
  if (p2p != nullptr) return *p2p;
  p2p = std::make_unique<nccl::DeviceP2p>(nccl::DeviceP2pOptions{
      .pairs = {.device = device,
                .communicators = is_first && !lacks_sharing() ? communicators_ : nullptr,
                .introduce = [nccl = nccl_](bool first) { return nccl->Introduce(first); },
                .limit = options_.nccl_limit,
                .direct = options_.nccl_direct,
                .max_ctas = options_.nccl_max_ctas,
                .cta_policy = options_.nccl_cta_policy},
      .least_direct_bytes = options_.least_direct_bytes,
      .rank = options_.host.rank,
      .on_failure = options_.host.on_failure,
      .on_progress = options_.host.on_progress});
  return *p2p;
}

std::vector<nccl::DeviceLane*> Lanes::DeviceLanes() const {
  std::vector<nccl::DeviceLane*> lanes;
  core::MutexLock lock(mutex_);
  for (const auto& [slot, lane] : devices_) {
    if (lane != nullptr) lanes.push_back(lane.get());
  }
  return lanes;
}

std::vector<nccl::DeviceP2p*> Lanes::DeviceP2ps() const {
  std::vector<nccl::DeviceP2p*> p2ps;
  core::MutexLock lock(mutex_);
  for (const auto& [device, p2p] : device_p2ps_) p2ps.push_back(p2p.get());
  return p2ps;
}

bool Lanes::Idle() const {
  if (!host_->Idle()) return false;
  const std::vector<nccl::DeviceLane*> lanes = DeviceLanes();
  return std::all_of(lanes.begin(), lanes.end(), [](const auto* lane) { return lane->Idle(); });
}

std::vector<core::RunningOperation> Lanes::Running() const {
  std::vector<core::RunningOperation> operations = host_->Running();
  for (const nccl::DeviceLane* lane : DeviceLanes()) {
    for (core::RunningOperation& operation : lane->Running()) {
      operations.push_back(std::move(operation));
    }
  }
  for (const nccl::DeviceP2p* p2p : DeviceP2ps()) {
    for (core::RunningOperation& operation : p2p->Running()) {
      operations.push_back(std::move(operation));
    }
  }
  std::stable_sort(operations.begin(), operations.end(),
                   [](const auto& a, const auto& b) { return a.since < b.since; });
  return operations;
}

void Lanes::EndMessages(const Status& why) {
  host_->EndMessages(why);
  for (nccl::DeviceP2p* p2p : DeviceP2ps()) {
    if (!p2p->Running().empty()) p2p->Abandon(why);
  }
}

void Lanes::Abandon(const Status& why) {
  host_->Abandon(why);
  for (nccl::DeviceLane* lane : DeviceLanes()) lane->Abandon(why);
  for (nccl::DeviceP2p* p2p : DeviceP2ps()) p2p->Abandon(why);
}

}  // namespace sirtaki::ops
