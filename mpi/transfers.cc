#include "mpi/transfers.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "mpi/check.h"
#include "mpi/environment.h"

namespace sirtaki::mpi {
namespace {

using core::Status;
using core::StatusCode;

std::string NameOf(const Transfer& piece) {
  return (piece.sends ? "MPI_Isend to member " : "MPI_Irecv from member ") +
         std::to_string(piece.peer);
}

}  // namespace

Transfers::Transfers(const TransferOptions& options, const std::vector<Transfer>& transfers,
                     const StopSign& stop)
    : options_(options) {
  // Receives first: what comes then need not be stored.
  for (const bool sends : {false, true}) {
    for (const Transfer& transfer : transfers) {
      if (transfer.sends == sends) Cut(transfer);
    }
  }
  Status status = stop.Get();
  if (status.ok()) status = StartAll();
  if (options_.mode == Mode::kPolled) {
    if (!status.ok()) Finish(std::move(status));
    return;
  }
  for (; status.ok() && next_ < pieces_.size(); ++next_) {
    MPI_Status received;
    const int code = MPI_Wait(&requests_[next_], &received);
    status = Judge(code, received);
    if (status.ok()) status = stop.Get();
  }
  Finish(std::move(status));
}

void Transfers::Cut(const Transfer& transfer) {
  Transfer piece = transfer;
  std::int64_t first = 0;
  do {
    piece.bytes = std::min(options_.max_call_bytes, transfer.bytes - first);
    if (transfer.sends) {
      piece.given = static_cast<const std::byte*>(transfer.given) + first;
    } else {
      piece.taken = static_cast<std::byte*>(transfer.taken) + first;
    }
    pieces_.push_back(piece);
    first += piece.bytes;
  } while (first < transfer.bytes);
}

Status Transfers::StartAll() {
  requests_.assign(pieces_.size(), MPI_REQUEST_NULL);
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const Transfer& piece = pieces_[i];
    const auto bytes = static_cast<int>(piece.bytes);
    started_ = true;
    const int code = piece.sends ? MPI_Isend(piece.given, bytes, MPI_BYTE, piece.peer, options_.tag,
                                             options_.comm, &requests_[i])
                                 : MPI_Irecv(piece.taken, bytes, MPI_BYTE, piece.peer, options_.tag,
                                             options_.comm, &requests_[i]);
    if (code != MPI_SUCCESS) return Check(code, NameOf(piece).c_str());
  }
  return Status::Ok();
}

Status Transfers::Judge(int code, const MPI_Status& received) const {
  const Transfer& piece = pieces_[next_];
  Status status = Check(code, NameOf(piece).c_str());
  if (!status.ok() || piece.sends) return status;
  int bytes = 0;
  MPI_Get_count(&received, MPI_BYTE, &bytes);
  if (bytes == piece.bytes) return Status::Ok();
  return {StatusCode::kBackend, NameOf(piece) + ": " + std::to_string(bytes) +
                                    " bytes came where " + std::to_string(piece.bytes) +
                                    " were expected"};
}

void Transfers::Finish(Status status) {
  if (!status.ok() && started_) Environment::NoteFault();
  status_ = std::move(status);
  finished_ = true;
}

bool Transfers::Poll() {
  // One after the other: a look costs the same however many pieces there are.
  while (!finished_) {
    if (next_ == pieces_.size()) {
      Finish(Status::Ok());
      break;
    }
    int done = 0;
    MPI_Status received;
    const int code = MPI_Test(&requests_[next_], &done, &received);
    if (code == MPI_SUCCESS && done == 0) return false;
    Status status = Judge(code, received);
    if (!status.ok()) Finish(std::move(status));
    ++next_;
  }
  return true;
}

// True if MPI knows of no piece any more.
bool Transfers::Withdraw() {
  if (pieces_.front().sends || Environment::HasFault()) return false;
  for (MPI_Request& request : requests_) {
    int done = 0;
    if (request == MPI_REQUEST_NULL) continue;
    if (MPI_Cancel(&request) != MPI_SUCCESS ||
        MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done == 0) {
      return false;
    }
  }
  return true;
}

Transfers::~Transfers() {
  if (!started_ || (finished_ && status_.ok())) return;
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return;
  if (!finished_ && options_.is_message && Withdraw()) return;
  Environment::NoteFault();
}

}  // namespace sirtaki::mpi
