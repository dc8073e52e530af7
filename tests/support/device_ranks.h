// Ranks that are threads, each with a GPU of FakeGpus and lanes over an in-process world.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/cuda/device_work.h"
#include "ops/inproc/inproc_backend.h"
#include "ops/lanes.h"
#include "tests/support/fake_gpus.h"
#include "tests/support/run_cases.h"

namespace sirtaki::tests {

// One rank. Made and used by the rank's thread.
class DeviceRank {
 public:
  // `change`: what a test wants otherwise. The rank's GPU is the one behind its number: not the
  // first, which a thread has that has chosen none.
  DeviceRank(FakeGpus& gpus, ops::InprocWorld& world, int rank,
             const std::function<void(ops::LanesOptions&)>& change = nullptr);

  ops::Lanes& lanes() { return *lanes_; }
  void EndLanes() { lanes_.reset(); }
  ops::cuda::StreamHandle producer() const { return producer_; }

  // The same work with its tensors on this rank's GPU, ready behind what is in producer().
  core::RunItem OnDevice(core::RunItem item);
  // `members`: of another set than the world.
  void Start(std::vector<core::RunItem> items, core::SetNumber set = core::kWorldSet,
             core::MembersPtr members = nullptr);
  // Drives the lanes as the engine does, until they are idle or have failed.
  void RunToIdle();

  // The first failure of any lane; ok without one. Thread-safe.
  core::Status failure() const;
  std::string failed_tensor() const;

 private:
  FakeGpus& gpus_;
  const int size_;
  std::unique_ptr<ops::Backend> backend_;
  std::shared_ptr<ops::cuda::Device> device_;
  std::unique_ptr<ops::cuda::EventPool> events_;
  ops::cuda::StreamHandle producer_ = nullptr;
  mutable core::Mutex mutex_;
  core::Status failure_ SIRTAKI_GUARDED_BY(mutex_);
  std::string failed_tensor_ SIRTAKI_GUARDED_BY(mutex_);
  std::unique_ptr<ops::Lanes> lanes_;  // goes first
};

// All-reduces without those that connect the ranks of a communicator when it is made. A rank has one
// communicator in them.
std::vector<std::string> WithoutConnecting(std::vector<std::string> calls);

// A case of the host's suite, on GPUs.
ops::RunCase OnDevice(ops::RunCase c);

}  // namespace sirtaki::tests
