#include "mpi/transport.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "mpi/check.h"
#include "mpi/gate.h"
#include "mpi/library.h"

namespace sirtaki::mpi {
namespace {

using core::Bytes;
using core::Incoming;
using core::Status;

constexpr int kTag = 0;

// More than these to one rank wait here and not in MPI, where each would hold resources of the
// network.
constexpr int kMaxInFlight = 32;

// Messages too large to arrive at once may come in beside each other, up to so many.
constexpr std::size_t kMaxReceiving = 64;

// "MPI_Isend to rank 3: …" of "MPI_Isend: …".
Status OfRank(const Status& status, const char* direction, int rank) {
  std::string text = status.message();
  text.insert(std::min(text.find(':'), text.size()),
              " " + std::string(direction) + " rank " + std::to_string(rank));
  return {status.code(), text};
}

}  // namespace

Transport::Transport(const Communicators& communicators)
    : comm_(communicators.transport()), rank_(communicators.rank()) {}

Transport::~Transport() {
  Flush();
  const bool receives_left =
      std::any_of(receiving_.begin(), receiving_.end(), [](const Receiving& r) { return !r.done; });
  // MPI reads from and writes to these until the requests complete, which nobody will wait for: a
  // request on the way cannot be called back. So the memory is given up.
  if (!sending_.empty()) static_cast<void>(new std::vector<Sending>(std::move(sending_)));
  if (!failed_.empty()) static_cast<void>(new std::vector<Sending>(std::move(failed_)));
  if (receives_left) static_cast<void>(new std::deque<Receiving>(std::move(receiving_)));
}

bool Transport::Note(Status status) {
  if (status.ok()) return true;
  if (health_.ok()) health_ = std::move(status);
  return false;
}

void Transport::Send(int rank, Bytes bytes) {
  if (rank == rank_) {
    to_self_.push_back(std::move(bytes));
    return;
  }
  constexpr auto kMaxBytes = static_cast<std::size_t>(std::numeric_limits<int>::max());
  if (bytes.size() > kMaxBytes) {
    Note({core::StatusCode::kBackend, "a message of " + std::to_string(bytes.size()) +
                                          " bytes to rank " + std::to_string(rank) +
                                          " is too long for MPI, which takes at most " +
                                          std::to_string(kMaxBytes)});
    return;
  }
  Link& link = links_[rank];
  if (link.in_flight >= kMaxInFlight) Flush();
  if (link.in_flight < kMaxInFlight && link.waiting.empty()) {
    StartSend(rank, link, std::move(bytes));
  } else {
    link.waiting.push_back(std::move(bytes));
    ++waiting_;
  }
}

void Transport::StartSend(int to, Link& link, Bytes bytes) {
  Sending sending;
  sending.to = to;
  sending.bytes = std::move(bytes);
  const int count = static_cast<int>(sending.bytes.size());
  const Status started = InMpi("MPI_Isend", [&] {
    return TheApi().Isend(sending.bytes.data(), count, to, kTag, comm_, &sending.request);
  });
  if (!started.ok()) {
    Note(OfRank(started, "to", to));
    return;
  }
  // A small message is mostly gone already, and then there is nothing to remember.
  if (HasLeft(sending)) return;
  ++link.in_flight;
  sending_.push_back(std::move(sending));
}

bool Transport::HasLeft(Sending& sending) {
  int done = 0;
  const Status tested = InMpi("MPI_Test of MPI_Isend",
                              [&] { return TheApi().Test(&sending.request, &done, nullptr); });
  if (tested.ok()) return done != 0;
  Note(OfRank(tested, "to", sending.to));
  failed_.push_back(std::move(sending));
  return true;
}

bool Transport::Flush() {
  for (std::size_t i = 0; i < sending_.size();) {
    const int to = sending_[i].to;
    if (!HasLeft(sending_[i])) {
      ++i;
      continue;
    }
    --links_[to].in_flight;
    if (i + 1 != sending_.size()) std::swap(sending_[i], sending_.back());
    sending_.pop_back();
  }
  if (waiting_ != 0) {
    for (auto& [to, link] : links_) {
      while (!link.waiting.empty() && link.in_flight < kMaxInFlight) {
        Bytes bytes = std::move(link.waiting.front());
        link.waiting.pop_front();
        --waiting_;
        StartSend(to, link, std::move(bytes));
      }
    }
  }
  return sending_.empty() && waiting_ == 0;
}

std::optional<Incoming> Transport::TryReceive() {
  if (!to_self_.empty()) {
    Incoming incoming{rank_, std::move(to_self_.front())};
    to_self_.pop_front();
    return incoming;
  }
  if (!health_.ok()) return std::nullopt;
  if (!sending_.empty()) Flush();
  while (receiving_.size() < kMaxReceiving && StartReceive()) {
    if (auto incoming = FinishReceive()) return incoming;
  }
  return FinishReceive();
}

bool Transport::StartReceive() {
  int found = 0;
  Message handle;
  Received envelope;
  const Entry entry("MPI_Improbe");
  if (!Note(entry.status()) ||
      !Note(Check(TheApi().Improbe(kTag, comm_, &found, &handle, &envelope), "MPI_Improbe")) ||
      found == 0) {
    return false;
  }
  // MPI_Mrecv would block: the rest of a large message comes when its sender next looks, which may
  // be never.
  Receiving& receiving = receiving_.emplace_back();
  receiving.message.from = envelope.source;
  receiving.message.bytes.resize(static_cast<std::size_t>(envelope.bytes));
  if (!Note(Check(TheApi().Imrecv(receiving.message.bytes.data(), envelope.bytes, &handle,
                                  &receiving.request),
                  "MPI_Imrecv"))) {
    receiving_.pop_back();
    return false;
  }
  return true;
}

std::optional<Incoming> Transport::FinishReceive() {
  for (auto it = receiving_.begin(); it != receiving_.end(); ++it) {
    if (!it->done) {
      int done = 0;
      Received received;
      const Expected expected{it->message.from, kTag,
                              static_cast<std::int64_t>(it->message.bytes.size())};
      Status tested;
      {
        const Entry entry("MPI_Test of MPI_Imrecv");
        tested = entry.status();
        if (entry.ok()) tested = Check(TheApi().Test(&it->request, &done, &received), "MPI_Imrecv");
        if (tested.ok() && done != 0) tested = CheckReceived(received, expected, "MPI_Imrecv");
      }
      if (!tested.ok()) {
        Note(OfRank(tested, "from", it->message.from));
        return std::nullopt;
      }
      it->done = done != 0;
    }
    if (!it->done) continue;
    // A large message may be overtaken by later ones of others, never by its own sender's.
    const bool first_of_its_sender = std::none_of(receiving_.begin(), it, [&](const Receiving& r) {
      return r.message.from == it->message.from;
    });
    if (!first_of_its_sender) continue;
    Incoming incoming = std::move(it->message);
    receiving_.erase(it);
    return incoming;
  }
  return std::nullopt;
}

}  // namespace sirtaki::mpi
