// Ports between threads of one process are what MPI is between processes: the medium of worlds in
// which threads act as ranks.
#pragma once

#include <cstdint>
#include <memory>

#include "ops/wire/port.h"

namespace sirtaki::ops {

struct InprocPortOptions {
  std::int64_t tags = std::int64_t{1} << 30;
};

class InprocPorts {
 public:
  explicit InprocPorts(int size, InprocPortOptions options = {});

  int size() const { return size_; }

  // It may outlive this object. Its Abort is that of all ports.
  std::unique_ptr<wire::Port> Connect(int rank) const;

 private:
  class Port;
  struct Mailboxes;

  const int size_;
  const InprocPortOptions options_;
  const std::shared_ptr<Mailboxes> mailboxes_;
};

}  // namespace sirtaki::ops
