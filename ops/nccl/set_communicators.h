// The communicators of one device's lane: one for each process set that uses the device, with the
// staging memory of its groups and the arenas of its buckets.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "core/base/rank_ranges.h"
#include "core/base/status.h"
#include "core/base/types.h"
#include "ops/cuda/cuda_api.h"
#include "ops/nccl/arena.h"
#include "ops/nccl/communicator.h"
#include "ops/nccl/device_memory.h"
#include "ops/nccl/process_communicators.h"
#include "ops/nccl/rendezvous.h"

namespace sirtaki::ops::nccl {

// Used by the lane's thread, whose device it is.
class SetCommunicators {
 public:
  struct Parts {
    std::unique_ptr<Communicator> communicator;
    std::unique_ptr<DeviceMemory> staging;
    std::unique_ptr<Arenas> arenas;  // goes first
  };

  SetCommunicators(const cuda::Api& cuda, std::shared_ptr<ArenaFrees> frees,
                   std::shared_ptr<ProcessCommunicators> all)
      : cuda_(cuda), frees_(std::move(frees)), all_(std::move(all)) {}

  // What a communicator is made with, beside what its members have said.
  struct Making {
    const cuda::Stream& stream;  // of its groups
    Choices choices;
    std::int64_t usual_bytes = 0;  // of a group
    // The current device, for a communicator that becomes direct; null: it does not.
    std::shared_ptr<const cuda::Device> direct = nullptr;
    Patience patience;
  };

  // After a rendezvous that all members have come to. If they cannot make one, all remember why.
  // The members are connected then. Errors: those of Communicator's, no memory.
  core::Status Make(core::SetNumber set, const Rendezvous& rendezvous,
                    const core::RankRanges& members, int rank, const Making& making);

  // Ok, or why the set's members cannot use the device.
  core::Status WhyRefused(core::SetNumber set) const;
  Parts* Find(core::SetNumber set);  // null: none was made

  // Precondition: nothing of the set is under way.
  core::Status Remove(core::SetNumber set, const Patience& patience);

  core::Status CheckAsync();
  // Says good-bye to the others. Those that fail stay with the process's, to be aborted.
  core::Status FinalizeAll(const Patience& patience);
  // Nobody knows what the device still does with them: they are not freed.
  void LeaveAll();
  // They are aborted, and the stream is through with their staging memory, which is freed. What the
  // ranks see of each other, an arena that is registered, is left: the others may not be through.
  void LeaveArenas();

 private:
  static core::Status Connect(Parts& parts, const Making& making);
  static core::Status End(Parts& parts, const Patience& patience);

  const cuda::Api& cuda_;
  const std::shared_ptr<ArenaFrees> frees_;
  const std::shared_ptr<ProcessCommunicators> all_;
  std::map<core::SetNumber, Parts> parts_;
  std::map<core::SetNumber, core::Status> refused_;
};

}  // namespace sirtaki::ops::nccl
