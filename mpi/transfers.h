// Sends and receives between two members each, all under way at once: an exchange of a lane, or one
// message.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "mpi/operation.h"
#include "ops/base/backend.h"

namespace sirtaki::mpi {

struct Transfer {
  bool sends = false;
  int peer = -1;  // rank of the communicator
  const void* given = nullptr;
  void* taken = nullptr;
  std::int64_t bytes = 0;
};

struct TransferOptions {
  MPI_Comm comm = MPI_COMM_NULL;
  int tag = 0;
  Mode mode = Mode::kPolled;
  // One message: a receive that is destroyed before anything has come is no fault.
  bool is_message = false;
  // Longer ones are cut into calls of at most this many bytes, on both sides alike.
  std::int64_t max_call_bytes = 0;
};

// Those of the same two members, tag and communicator match in the order in which they are listed,
// over all Transfers: everything is started by the constructor. Blocking: finished then. Polled: by
// one thread at a time. A receive of another length than was sent is an error.
class Transfers final : public ops::Completion {
 public:
  Transfers(const TransferOptions& options, const std::vector<Transfer>& transfers,
            const StopSign& stop);

  // Unfinished or failed: MPI may still use the memory.
  ~Transfers() override;

  bool Poll() override;
  core::Status status() const override { return status_; }

 private:
  void Cut(const Transfer& transfer);
  core::Status StartAll();
  void Finish(core::Status status);
  // What became of the next piece, whose request has been completed.
  core::Status Judge(int code, const MPI_Status& received) const;
  bool Withdraw();

  const TransferOptions options_;
  std::vector<Transfer> pieces_;  // one call each
  std::vector<MPI_Request> requests_;
  std::size_t next_ = 0;  // all before have finished
  bool started_ = false;  // MPI has been called
  bool finished_ = false;
  core::Status status_;
};

}  // namespace sirtaki::mpi
