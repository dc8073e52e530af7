// Collectives between threads of one process: those of ops/wire over ports between threads.
#pragma once

#include <memory>

#include "ops/base/backend.h"
#include "ops/inproc/inproc_port.h"
#include "ops/wire/wire_backend.h"

namespace sirtaki::ops {

class InprocWorld {
 public:
  explicit InprocWorld(int size, wire::WireOptions options = {});

  int size() const { return ports_.size(); }

  // The backend of a rank, which may outlive the world object. Its Abort ends the whole world: what
  // waits on any rank, and whatever would move data later, returns the reason.
  std::unique_ptr<Backend> Connect(int rank) const;

 private:
  const InprocPorts ports_;
  const wire::WireOptions options_;
};

}  // namespace sirtaki::ops
