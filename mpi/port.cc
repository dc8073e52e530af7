#include "mpi/port.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "mpi/environment.h"
#include "mpi/gate.h"
#include "mpi/library.h"
#include "ops/base/finished.h"

namespace sirtaki::mpi {
namespace {

using core::Status;
using core::StatusCode;
using ops::wire::Envelope;

// One MPI call.
struct Piece {
  bool sends = false;
  int rank = -1;
  const void* given = nullptr;
  void* taken = nullptr;
  int bytes = 0;

  std::string ToString() const {
    return (sends ? "MPI_Isend to rank " : "MPI_Irecv from rank ") + std::to_string(rank);
  }
};

// The transfers are what one Post has started.
class Transfers final : public ops::Completion {
 public:
  Transfers(Comm comm, int tag, bool is_message, std::vector<Piece> pieces)
      : comm_(comm), tag_(tag), is_message_(is_message), pieces_(std::move(pieces)) {
    requests_.resize(pieces_.size());
    const Entry entry("MPI_Isend or MPI_Irecv");
    if (!entry.ok()) Finish(entry.status());
    for (std::size_t i = 0; i < pieces_.size() && !finished_; ++i) {
      const Piece& piece = pieces_[i];
      const int code =
          piece.sends
              ? TheApi().Isend(piece.given, piece.bytes, piece.rank, tag_, comm_, &requests_[i])
              : TheApi().Irecv(piece.taken, piece.bytes, piece.rank, tag_, comm_, &requests_[i]);
      if (code != 0) Finish(Check(code, piece.ToString().c_str()));
    }
  }

  // Unfinished or failed: MPI may still use the memory.
  ~Transfers() override {
    if ((finished_ && status_.ok()) || IsFinalized()) return;
    if (!finished_ && is_message_ && Withdraw()) return;
    Environment::NoteFault();
  }

  bool Poll() override {
    if (finished_) return true;
    // One after the other: a look costs the same however many pieces there are.
    const Entry entry("MPI_Test");
    if (!entry.ok()) {
      Finish(entry.status());
      return true;
    }
    for (; next_ < pieces_.size(); ++next_) {
      int done = 0;
      Received received;
      const int code = TheApi().Test(&requests_[next_], &done, &received);
      if (code == 0 && done == 0) return false;
      Status status = Judge(code, received);
      if (!status.ok()) {
        Finish(std::move(status));
        return true;
      }
    }
    Finish(Status::Ok());
    return true;
  }

  Status status() const override { return status_; }

 private:
  // Judges the next piece, whose request has been completed. In MPI.
  Status Judge(int code, const Received& received) const {
    const Piece& piece = pieces_[next_];
    Status status = Check(code, piece.ToString().c_str());
    if (!status.ok() || piece.sends) return status;
    return CheckReceived(received, {piece.rank, tag_, piece.bytes}, piece.ToString());
  }

  void Finish(Status status) {
    if (!status.ok()) Environment::NoteFault();
    status_ = std::move(status);
    finished_ = true;
  }

  // True if MPI knows of no piece any more.
  bool Withdraw() {
    if (pieces_.front().sends || Environment::HasFault()) return false;
    const Entry entry("MPI_Cancel");
    if (!entry.ok()) return false;
    for (Request& request : requests_) {
      int done = 0;
      if (request.is_null()) continue;
      if (TheApi().Cancel(&request) != 0 || TheApi().Test(&request, &done, nullptr) != 0 ||
          done == 0) {
        return false;
      }
    }
    return true;
  }

  const Comm comm_;
  const int tag_;
  const bool is_message_;
  const std::vector<Piece> pieces_;
  std::vector<Request> requests_;
  std::size_t next_ = 0;  // all before have finished
  bool finished_ = false;
  Status status_;
};

// Shorter messages go without an answer of their receiver (Open MPI's least limit is 4 KiB).
bool IsLargeSend(const Piece& piece) { return piece.sends && piece.bytes > 4096; }

// A transfer of no bytes is a message, too.
template <typename Add>
void Cut(std::int64_t bytes, std::int64_t most, const Add& add) {
  std::int64_t first = 0;
  do {
    add(first, static_cast<int>(std::min(most, bytes - first)));
    first += most;
  } while (first < bytes);
}

}  // namespace

std::unique_ptr<ops::Completion> Port::Post(Envelope envelope,
                                            std::span<const ops::wire::Receive> receives,
                                            std::span<const ops::wire::Send> sends) {
  if (Status stopped = stop_.why(); !stopped.ok()) return ops::Finished::With(std::move(stopped));
  std::vector<Piece> pieces;
  pieces.reserve(receives.size() + sends.size());
  for (const ops::wire::Receive& receive : receives) {
    Cut(receive.bytes, options_.max_call_bytes, [&](std::int64_t first, int bytes) {
      pieces.push_back({.rank = receive.rank,
                        .taken = static_cast<std::byte*>(receive.memory) + first,
                        .bytes = bytes});
    });
  }
  for (const ops::wire::Send& send : sends) {
    Cut(send.bytes, options_.max_call_bytes, [&](std::int64_t first, int bytes) {
      pieces.push_back({.sends = true,
                        .rank = send.rank,
                        .given = static_cast<const std::byte*>(send.memory) + first,
                        .bytes = bytes});
    });
  }
  // Large sends go first. A receive that meets a large message says so to its sender, who then fills
  // the connection: what this rank sent behind that answer would be seen, and answered, only when all
  // of it has come, and the two directions of a link would take turns.
  if (std::any_of(pieces.begin(), pieces.end(), IsLargeSend)) {
    std::stable_partition(pieces.begin(), pieces.end(),
                          [](const Piece& piece) { return piece.sends; });
  }
  const bool is_message = envelope.space == Envelope::Space::kMessages;
  return std::make_unique<Transfers>(
      is_message ? communicators_.messages() : communicators_.collectives(),
      is_message ? communicators_.MessageTag(envelope.tag) : envelope.tag, is_message,
      std::move(pieces));
}

}  // namespace sirtaki::mpi
