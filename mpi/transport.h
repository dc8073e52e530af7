// The engine's messages over MPI: one non-blocking send each, received with a matched probe.
//
// MPI cannot ring when something arrives, so ArrivalsRing() is false and sleepers come back to
// look; the doorbell serves for everything else. See core/protocol/transport.h for who may call
// what.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/protocol/transport.h"
#include "core/threads/doorbell.h"
#include "mpi/communicators.h"

namespace sirtaki::mpi {

class Transport final : public core::Transport {
 public:
  // The communicators must outlive the transport.
  explicit Transport(const Communicators& communicators);

  // Never blocks. What is still under way (after a fault, or because Flush was not called until
  // true) is left to MPI together with its memory.
  ~Transport() override;

  // A message of 2 GiB or more is a failure. After one it still tries, so that the others may learn
  // of it.
  void Send(int rank, core::Bytes bytes) override;
  std::optional<core::Incoming> TryReceive() override;
  bool Flush() override;
  core::Status health() const override { return health_; }

  std::uint64_t ArmDoorbell() override { return doorbell_.Arm(); }
  bool WaitUntil(std::uint64_t ticket, core::TimePoint deadline) override {
    return doorbell_.WaitUntil(ticket, deadline);
  }
  void Wake() override { doorbell_.Ring(); }
  bool ArrivalsRing() const override { return false; }

 private:
  struct Sending {
    Request request;
    int to = -1;
    core::Bytes bytes;
  };
  struct Receiving {
    Request request;
    core::Incoming message;
    bool done = false;
  };
  struct Link {
    int in_flight = 0;
    std::deque<core::Bytes> waiting;  // for fewer messages in flight
  };

  void StartSend(int to, Link& link, core::Bytes bytes);
  bool StartReceive();  // true if a message was there
  std::optional<core::Incoming> FinishReceive();
  bool Note(core::Status status);  // keeps the first failure; true if ok
  bool HasLeft(Sending& sending);  // or will never be known to have left

  const Comm comm_;
  const int rank_;
  core::Status health_;
  core::Doorbell doorbell_;
  std::deque<core::Bytes> to_self_;
  std::unordered_map<int, Link> links_;
  std::size_t waiting_ = 0;  // messages in all outboxes
  std::vector<Sending> sending_;
  std::vector<Sending> failed_;      // MPI may still read these
  std::deque<Receiving> receiving_;  // in the order of their matching
};

}  // namespace sirtaki::mpi
