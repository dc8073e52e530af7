#include "tcp/port.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "ops/base/finished.h"

namespace sirtaki::tcp {
namespace {

using core::Status;
using core::StatusCode;
using ops::wire::Envelope;
using ops::wire::Receive;
using ops::wire::Send;

// The transfers are what one Post has started.
class Transfers final : public ops::Completion {
 public:
  Transfers(const Port& port, Envelope envelope, std::size_t count)
      : port_(port), envelope_(envelope), transfers_(count), streams_(count) {}

  // The memory is not read or written after this.
  ~Transfers() override {
    for (std::size_t i = next_; i < started_; ++i) streams_[i]->Withdraw(envelope_, &transfers_[i]);
  }

  Transfer* Add(Stream* stream) {
    streams_[started_] = stream;
    return &transfers_[started_++];
  }

  bool Poll() override {
    if (Look()) return true;
    // Two transfers with one rank are mostly neighbours.
    for (std::size_t i = next_; i < started_; ++i) {
      if (i == next_ || streams_[i] != streams_[i - 1]) streams_[i]->Progress();
    }
    if (Look()) return true;
    port_.ProgressAll();
    return false;
  }
  Status status() const override { return status_; }

 private:
  // True if all are done, or the first that is not has failed.
  bool Look() {
    for (; next_ < started_ && status_.ok(); ++next_) {
      if (!transfers_[next_].done.load(std::memory_order_acquire)) return false;
      status_ = transfers_[next_].status;
    }
    return true;
  }

  const Port& port_;
  const Envelope envelope_;
  std::vector<Transfer> transfers_;
  std::vector<Stream*> streams_;  // of each
  std::size_t started_ = 0;
  std::size_t next_ = 0;  // all before are done
  Status status_;
};

std::vector<std::unique_ptr<Stream>> StreamsOf(std::vector<Line> lines, int own_rank,
                                               const std::vector<std::string>& hosts,
                                               Patience patience) {
  std::vector<std::unique_ptr<Stream>> streams(lines.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (!lines[i].valid()) continue;
    streams[i] = std::make_unique<Stream>(std::move(lines[i]), own_rank, static_cast<int>(i), hosts,
                                          patience);
  }
  return streams;
}

}  // namespace

Port::Port(int rank, std::vector<Line> urgent, std::vector<Line> bulk,
           const std::vector<std::string>& hosts, Patience patience)
    : rank_(rank),
      size_(static_cast<int>(bulk.size())),
      urgent_(StreamsOf(std::move(urgent), rank, hosts, patience)),
      bulk_(StreamsOf(std::move(bulk), rank, hosts, patience)),
      self_(ops::InprocPorts(1).Connect(0)) {}

void Port::ProgressAll() const {
  for (const auto* streams : {&urgent_, &bulk_}) {
    for (const auto& stream : *streams) {
      if (stream && stream->is_busy()) stream->Progress();
    }
  }
}

std::unique_ptr<ops::Completion> Port::Post(Envelope envelope, std::span<const Receive> receives,
                                            std::span<const Send> sends) {
  if (Status stopped = stop_.why(); !stopped.ok()) return ops::Finished::With(std::move(stopped));
  const auto is_own = [this](const auto& all) { return !all.empty() && all[0].rank == rank_; };
  // A rank sends to itself alone.
  if (is_own(receives) || is_own(sends)) {
    std::vector<Receive> taken(receives.begin(), receives.end());
    std::vector<Send> given(sends.begin(), sends.end());
    for (Receive& one : taken) one.rank = 0;
    for (Send& one : given) one.rank = 0;
    return self_->Post(envelope, taken, given);
  }
  auto transfers = std::make_unique<Transfers>(*this, envelope, receives.size() + sends.size());
  const auto start = [&](int rank, std::int64_t bytes, const auto& set) {
    Stream* const stream = StreamTo(envelope, rank);
    Transfer* const transfer = transfers->Add(stream);
    transfer->bytes = bytes;
    set(transfer);
    stream->Start(envelope, transfer);
  };
  // Receives come first: their senders then know where to, and need no answer.
  for (const Receive& receive : receives) {
    start(receive.rank, receive.bytes,
          [&](Transfer* one) { one->taken = static_cast<std::byte*>(receive.memory); });
  }
  for (const Send& send : sends) {
    start(send.rank, send.bytes, [&](Transfer* one) {
      one->sends = true;
      one->given = static_cast<const std::byte*>(send.memory);
    });
  }
  return transfers;
}

}  // namespace sirtaki::tcp
