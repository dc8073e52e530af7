#include "tests/support/device_ranks.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>

namespace sirtaki::tests {

DeviceRank::DeviceRank(FakeGpus& gpus, ops::InprocWorld& world, int rank,
                       const std::function<void(ops::LanesOptions&)>& change)
    : gpus_(gpus), size_(world.size()), backend_(world.Connect(rank)) {
  EXPECT_TRUE(ops::cuda::Device::Open(gpus.cuda(), rank + 1, &device_).ok());
  events_ = std::make_unique<ops::cuda::EventPool>(device_);
  producer_ = gpus.MakeStream(rank + 1);
  ops::LanesOptions options;
  options.host.rank = rank;
  options.host.on_failure = [this](const core::Status& why, const std::string& tensor) {
    core::MutexLock lock(mutex_);
    if (!failure_.ok()) return;
    failure_ = why;
    failed_tensor_ = tensor;
  };
  options.load_nccl = [&gpus](ops::nccl::Library* library) {
    library->api = gpus.nccl();
    library->version = ops::nccl::kDeclaredVersion;
    return core::Status::Ok();
  };
  options.kernels = "an image";
  if (change) change(options);
  lanes_ = std::make_unique<ops::Lanes>(std::move(options), *backend_);
}

core::RunItem DeviceRank::OnDevice(core::RunItem item) {
  if (item.work == nullptr) return item;
  auto work = std::dynamic_pointer_cast<ops::cuda::DeviceWork>(item.work);
  if (work == nullptr) {
    work = std::make_shared<ops::cuda::DeviceWork>();
    static_cast<core::Work&>(*work) = *item.work;
  }
  work->device = device_;
  EXPECT_TRUE(NoteReady(*events_, producer_, work.get()).ok());
  item.work = std::move(work);
  return item;
}

void DeviceRank::Start(std::vector<core::RunItem> items, core::SetNumber set,
                       core::MembersPtr members) {
  core::RunBatch batch = ops::SmallBatch(size_);
  batch.set = set;
  if (members != nullptr) batch.members = std::move(members);
  batch.items = std::move(items);
  lanes_->Start(std::move(batch), core::Clock::now());
}

void DeviceRank::RunToIdle() {
  while (!lanes_->Idle() && failure().ok()) {
    if (!lanes_->Step()) std::this_thread::yield();
  }
}

core::Status DeviceRank::failure() const {
  core::MutexLock lock(mutex_);
  return failure_;
}

std::string DeviceRank::failed_tensor() const {
  core::MutexLock lock(mutex_);
  return failed_tensor_;
}

std::vector<std::string> WithoutConnecting(std::vector<std::string> calls) {
  std::multiset<std::string> connected;  // which ranks have, by which size, once before the split
  std::erase_if(calls, [&connected](const std::string& call) {
    const bool is_like_it =
        call.ends_with(" count 1 type 7 op 0") || call.ends_with(" count 262144 type 7 op 0");
    if (!is_like_it || connected.count(call) == 2) return false;
    connected.insert(call);
    return true;
  });
  return calls;
}

ops::RunCase OnDevice(ops::RunCase c) {
  c.signature.device = core::DeviceKind::kCuda;
  return c;
}

}  // namespace sirtaki::tests
