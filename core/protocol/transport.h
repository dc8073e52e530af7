// How engines exchange bytes. Implementations: the in-process hub (core/protocol/inproc_hub),
// shared memory (ops/shm/transport), MPI (mpi/transport) and TCP (tcp/transport). Each passes the
// same conformance test (tests/support/transport_conformance.h).
#pragma once

#include <cstdint>
#include <optional>

#include "core/base/status.h"
#include "core/base/types.h"
#include "core/protocol/wire.h"

namespace sirtaki::core {

struct Incoming {
  int from = -1;
  Bytes bytes;
};

// A bell is what threads sleep on while nothing moves.
class Bell {
 public:
  virtual ~Bell() = default;

  // A ticket for WaitUntil. Taken before the last look for work, by a holder of the token; or by
  // anyone, before the last look at a handle, while somebody else has the token. Whatever happens
  // after it (a Wake, and for sleeping transports an arrival) makes the next WaitUntil(ticket)
  // return.
  virtual std::uint64_t ArmDoorbell() = 0;

  // WaitUntil sleeps, without the token, until the doorbell rang after `ticket` was taken, or
  // `deadline`. True if it rang. May be called by several threads.
  virtual bool WaitUntil(std::uint64_t ticket, TimePoint deadline) = 0;

  // Wake rings the doorbell: by anyone, at any time.
  virtual void Wake() = 0;
};

class Transport : public Bell {
 public:
  // ---- by the holder of the engine's token only ----

  // Sends to a world rank, in order per pair. Never blocks: what does not fit waits in an outbox
  // that later calls of TryReceive and Flush push on. Errors are kept and shown by health().
  virtual void Send(int rank, Bytes bytes) = 0;

  // The next message that has arrived, from anyone; none if there is none now.
  virtual std::optional<Incoming> TryReceive() = 0;

  // Pushes the outbox on. True if everything that was sent has left this process.
  virtual bool Flush() = 0;

  // The first failure of the medium, ok until then. Once failed, it stays failed.
  virtual Status health() const = 0;

  // Whether every rank is connected already, so that any may be sent to, not only neighbours in the
  // tree.
  virtual bool ReachesAll() const { return false; }

  // True if an arrival rings the doorbell. False (MPI): sleepers must poll at intervals.
  virtual bool ArrivalsRing() const = 0;
};

}  // namespace sirtaki::core
