#include "ops/inproc/inproc_port.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "ops/base/finished.h"

namespace sirtaki::ops {
namespace {

using core::Status;
using core::StatusCode;
using wire::Envelope;

using Address = std::tuple<int, int, int>;  // from, to, tag

// One side of a message that waits for the other, or waited. Guarded by the mailboxes' mutex.
struct Side {
  Address address;
  const void* given = nullptr;  // of a send
  void* taken = nullptr;        // of a receive
  std::int64_t bytes = 0;
  bool sends = false;
  bool done = false;
  Status status;

  void Finish(Status how) {
    if (done) return;
    done = true;
    status = std::move(how);
  }
};
using SidePtr = std::shared_ptr<Side>;

}  // namespace

// The messages of the in-process world. A message is not stored: it moves when both the send and
// its receive are there, so a send is under way until then, as one of a large message is over a
// network. Thread-safe.
struct InprocPorts::Mailboxes {
  void Match(const SidePtr& side) SIRTAKI_REQUIRES(mutex);
  void Withdraw(const SidePtr& side) SIRTAKI_REQUIRES(mutex);

  core::Mutex mutex;
  Status aborted SIRTAKI_GUARDED_BY(mutex);
  // Sends or receives of an address, never both, in the order of the calls.
  std::map<Address, std::deque<SidePtr>> waiting SIRTAKI_GUARDED_BY(mutex);
};

void InprocPorts::Mailboxes::Match(const SidePtr& side) {
  auto& box = waiting[side->address];
  if (box.empty() || box.front()->sends == side->sends) {
    box.push_back(side);
    return;
  }
  const SidePtr other = std::move(box.front());
  box.pop_front();
  if (box.empty()) waiting.erase(side->address);
  const Side& send = side->sends ? *side : *other;
  Side& receive = side->sends ? *other : *side;
  if (send.bytes != receive.bytes) {
    const auto [from, to, tag] = side->address;
    receive.Finish({StatusCode::kBackend,
                    "rank " + std::to_string(from) + " sent " + std::to_string(send.bytes) +
                        " bytes with tag " + std::to_string(tag) + " where rank " +
                        std::to_string(to) + " takes " + std::to_string(receive.bytes)});
  } else if (send.bytes > 0) {
    std::memcpy(receive.taken, send.given, static_cast<std::size_t>(send.bytes));
  }
  side->Finish(Status::Ok());
  other->Finish(Status::Ok());
}

void InprocPorts::Mailboxes::Withdraw(const SidePtr& side) {
  if (side->done) return;
  const auto box = waiting.find(side->address);
  box->second.erase(std::find(box->second.begin(), box->second.end(), side));
  if (box->second.empty()) waiting.erase(box);
}

class InprocPorts::Port final : public wire::Port {
 public:
  Port(int rank, const InprocPorts& ports)
      : rank_(rank), size_(ports.size_), tags_(ports.options_.tags), mailboxes_(ports.mailboxes_) {}

  std::string_view name() const override { return "in-process"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::int64_t tags() const override { return tags_; }

  std::unique_ptr<Completion> Post(Envelope envelope, std::span<const wire::Receive> receives,
                                   std::span<const wire::Send> sends) override;

  bool lets_go() const override { return true; }
  void Abort(const Status& why) override {
    core::MutexLock lock(mailboxes_->mutex);
    if (!mailboxes_->aborted.ok()) return;
    mailboxes_->aborted = why;
    for (auto& [address, box] : std::exchange(mailboxes_->waiting, {})) {
      for (const SidePtr& side : box) side->Finish(why);
    }
  }

 private:
  class Pending;

  Status Check(const Side& side, const Envelope& envelope) const;

  const int rank_;
  const int size_;
  const std::int64_t tags_;
  const std::shared_ptr<Mailboxes> mailboxes_;
};

// Finished when all sides are, or the first has failed.
class InprocPorts::Port::Pending final : public Completion {
 public:
  Pending(std::shared_ptr<Mailboxes> mailboxes, std::vector<SidePtr> sides)
      : mailboxes_(std::move(mailboxes)), sides_(std::move(sides)) {}
  // The memory is not read or written after this.
  ~Pending() override {
    core::MutexLock lock(mailboxes_->mutex);
    for (const SidePtr& side : sides_) mailboxes_->Withdraw(side);
  }

  bool Poll() override {
    core::MutexLock lock(mailboxes_->mutex);
    for (; next_ < sides_.size() && status_.ok(); ++next_) {
      if (!sides_[next_]->done) return false;
      status_ = sides_[next_]->status;
    }
    return true;
  }
  Status status() const override { return status_; }

 private:
  const std::shared_ptr<Mailboxes> mailboxes_;
  const std::vector<SidePtr> sides_;
  std::size_t next_ = 0;  // all before have finished
  Status status_;
};

Status InprocPorts::Port::Check(const Side& side, const Envelope& envelope) const {
  const auto [from, to, tag] = side.address;
  const int peer = side.sends ? to : from;
  const bool tagged = envelope.space == Envelope::Space::kCollectives ||
                      (envelope.tag >= 0 && envelope.tag <= Backend::kAnswerTag);
  if (peer >= 0 && peer < size_ && tagged && side.bytes >= 0) return Status::Ok();
  return {StatusCode::kInvalidArgument,
          "rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " cannot " +
              (side.sends ? "send " : "receive ") + std::to_string(side.bytes) + " bytes: rank " +
              std::to_string(peer) + ", tag " + std::to_string(envelope.tag)};
}

std::unique_ptr<Completion> InprocPorts::Port::Post(Envelope envelope,
                                                    std::span<const wire::Receive> receives,
                                                    std::span<const wire::Send> sends) {
  const int tag = envelope.space == Envelope::Space::kMessages
                      ? envelope.tag
                      : Backend::kAnswerTag + 1 + envelope.tag;
  std::vector<SidePtr> sides;
  for (const wire::Receive& receive : receives) {
    sides.push_back(std::make_shared<Side>(Side{
        .address = {receive.rank, rank_, tag}, .taken = receive.memory, .bytes = receive.bytes}));
  }
  for (const wire::Send& send : sends) {
    sides.push_back(std::make_shared<Side>(Side{.address = {rank_, send.rank, tag},
                                                .given = send.memory,
                                                .bytes = send.bytes,
                                                .sends = true}));
  }
  for (const SidePtr& side : sides) {
    if (Status status = Check(*side, envelope); !status.ok()) return Finished::With(status);
  }
  core::MutexLock lock(mailboxes_->mutex);
  if (!mailboxes_->aborted.ok()) return Finished::With(mailboxes_->aborted);
  for (const SidePtr& side : sides) mailboxes_->Match(side);
  return std::make_unique<Pending>(mailboxes_, std::move(sides));
}

InprocPorts::InprocPorts(int size, InprocPortOptions options)
    : size_(size), options_(options), mailboxes_(std::make_shared<Mailboxes>()) {}

std::unique_ptr<wire::Port> InprocPorts::Connect(int rank) const {
  return std::make_unique<Port>(rank, *this);
}

}  // namespace sirtaki::ops
