// The engine's messages between ranks of a host by mailboxes in shared memory, and to the others by
// the medium's own transport. Sleepers sleep on this rank's bell in its session memory, which the
// others ring.
#pragma once

#include <cstdint>
#include <optional>

#include "core/transport.h"
#include "ops/shm/local_group.h"

namespace sirtaki::ops::shm {

class Transport final : public core::Transport {
 public:
  // Both must outlive the transport.
  Transport(LocalGroup& group, core::Transport& beyond) : group_(group), beyond_(beyond) {}

  void Send(int rank, core::Bytes bytes) override { beyond_.Send(rank, std::move(bytes)); }
  std::optional<core::Incoming> TryReceive() override { return beyond_.TryReceive(); }
  bool Flush() override { return beyond_.Flush(); }
  core::Status health() const override { return beyond_.health(); }
  std::uint64_t ArmDoorbell() override { return beyond_.ArmDoorbell(); }
  bool WaitUntil(std::uint64_t ticket, core::TimePoint deadline) override {
    return beyond_.WaitUntil(ticket, deadline);
  }
  void Wake() override { beyond_.Wake(); }
  bool ArrivalsRing() const override { return beyond_.ArrivalsRing(); }

 private:
  [[maybe_unused]] LocalGroup& group_;
  core::Transport& beyond_;
};

}  // namespace sirtaki::ops::shm
