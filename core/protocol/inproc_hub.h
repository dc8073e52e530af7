// N transports in one process: threads act as ranks. Product code for tests and for several
// sessions in one process.
#pragma once

#include <memory>

#include "core/protocol/transport.h"

namespace sirtaki::core {

struct InprocMailboxes;

class InprocHub {
 public:
  explicit InprocHub(int size);
  int size() const;

  // The transport of a rank, which one engine has at a time. It may outlive the hub. What arrives
  // for a rank without a transport waits for its next one.
  std::unique_ptr<Transport> Connect(int rank);

  // ---- for tests; thread-safe ----
  // Messages from and to this rank are swallowed from now on, as if it had been stopped.
  void Isolate(int rank);
  // The rank's transport fails with this status from now on: it neither sends nor receives.
  void Break(int rank, Status why);

 private:
  std::shared_ptr<InprocMailboxes> mailboxes_;
};

}  // namespace sirtaki::core
