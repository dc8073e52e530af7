// A group of tensors as it was planned: they are of one class (fusion::Plan), and are moved together.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/engine/executor.h"
#include "fusion/planner.h"
#include "ops/base/backend.h"

namespace sirtaki::ops {

struct GroupItem {
  core::SignaturePtr signature;
  core::WorkPtr work;    // null: this rank has joined
  std::size_t call = 0;  // whose tensor it is, among the task's
};

// Shared by who runs it and who reports or fails it; never changed once it is queued.
struct GroupTask {
  // A call waits for the group, for this one alone or for others as well.
  struct Call {
    core::Key key;
    core::HandlePtr handle;  // null: this rank has joined
  };

  Channel channel;
  Route route;  // set where it is queued in a host lane
  core::MembersPtr members;
  int rank = 0;                  // this one
  std::vector<Call> calls;       // not empty
  std::vector<GroupItem> items;  // not empty
  core::RankRanges silent;       // of all of them
  core::TimePoint since{};
  core::Limits limits;
  // A group on the large lane begins when it is set, and whoever sets it has set the inputs of
  // its work before. Null: they are there.
  std::shared_ptr<const std::atomic<bool>> inputs_there;

  std::uint64_t number = 0;  // it is the n-th group of its lanes on this rank, from 1
  bool of_device = false;    // the host's part of a device's group, which counts as one

  // Returns the bytes that this rank gives to the group.
  std::int64_t InputBytes() const;
  const core::Signature& signature() const { return *items.front().signature; }
  const core::Key& key() const { return calls.front().key; }
  const core::Key& KeyOf(const GroupItem& item) const { return calls[item.call].key; }
  // Whether this rank has joined: no item has work.
  bool joined() const { return items.front().work == nullptr; }
  bool is_on_device() const { return signature().device != core::DeviceKind::kHost; }
  // `all-reduce of 12 tensors from "layer1.weight" (large lane)`
  std::string ToString() const;
  // Ends this piece of all calls.
  void Complete(const core::Status& status) const;
};
using GroupTaskPtr = std::shared_ptr<const GroupTask>;

// The groups of a batch, in the order of its plan. What no rank has is completed.
std::vector<std::shared_ptr<GroupTask>> MakeGroups(core::RunBatch batch, bool deterministic,
                                                   int rank, core::TimePoint now);

}  // namespace sirtaki::ops
