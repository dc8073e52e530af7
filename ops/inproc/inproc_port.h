// Ports between threads of one process: what MPI is between processes. For tests in which threads
// act as ranks.
#pragma once

#include <cstdint>
#include <memory>

#include "ops/inproc/mailboxes.h"
#include "ops/wire/port.h"

namespace sirtaki::ops {

struct InprocPortOptions {
  std::int64_t tags = 1 << 20;
};

class InprocPorts {
 public:
  explicit InprocPorts(int size, InprocPortOptions options = {})
      : size_(size), options_(options), mailboxes_(std::make_shared<Mailboxes>()) {}

  // It may outlive this object.
  std::unique_ptr<wire::Port> Connect(int rank) const;

 private:
  const int size_;
  const InprocPortOptions options_;
  const std::shared_ptr<Mailboxes> mailboxes_;
};

}  // namespace sirtaki::ops
