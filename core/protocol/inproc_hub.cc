#include "core/protocol/inproc_hub.h"

#include <atomic>
#include <deque>
#include <utility>
#include <vector>

#include "core/base/check.h"
#include "core/base/thread_annotations.h"
#include "core/threads/doorbell.h"

namespace sirtaki::core {

namespace {

struct Mailbox {
  Doorbell doorbell;
  std::atomic<bool> isolated{false};
  std::atomic<bool> broken{false};
  std::atomic<bool> waiting{false};  // messages is not empty; saves the lock when polled
  Mutex mutex;
  std::deque<Incoming> messages SIRTAKI_GUARDED_BY(mutex);
  Status failure SIRTAKI_GUARDED_BY(mutex);
};

}  // namespace

struct InprocMailboxes {
  explicit InprocMailboxes(int size) : of_rank(static_cast<std::size_t>(size)) {}

  Mailbox& Of(int rank) {
    SIRTAKI_CHECK(rank >= 0 && rank < static_cast<int>(of_rank.size()), "no such rank in the hub");
    return of_rank[static_cast<std::size_t>(rank)];
  }

  std::vector<Mailbox> of_rank;
};

namespace {

class InprocTransport final : public Transport {
 public:
  InprocTransport(std::shared_ptr<InprocMailboxes> mailboxes, int rank)
      : mailboxes_(std::move(mailboxes)), rank_(rank), mine_(mailboxes_->Of(rank)) {}

  void Send(int rank, Bytes bytes) override {
    Mailbox& theirs = mailboxes_->Of(rank);
    if (mine_.isolated || theirs.isolated || mine_.broken) return;
    {
      MutexLock lock(theirs.mutex);
      theirs.messages.push_back({rank_, std::move(bytes)});
      theirs.waiting.store(true, std::memory_order_release);
    }
    theirs.doorbell.Ring();
  }

  std::optional<Incoming> TryReceive() override {
    if (!mine_.waiting.load(std::memory_order_acquire) || mine_.broken) return std::nullopt;
    MutexLock lock(mine_.mutex);
    if (mine_.messages.empty()) return std::nullopt;
    Incoming message = std::move(mine_.messages.front());
    mine_.messages.pop_front();
    mine_.waiting.store(!mine_.messages.empty(), std::memory_order_release);
    return message;
  }

  bool Flush() override { return true; }

  Status health() const override {
    if (!mine_.broken) return Status::Ok();
    MutexLock lock(mine_.mutex);
    return mine_.failure;
  }

  std::uint64_t ArmDoorbell() override { return mine_.doorbell.Arm(); }
  bool WaitUntil(std::uint64_t ticket, TimePoint deadline) override {
    return mine_.doorbell.WaitUntil(ticket, deadline);
  }
  void Wake() override { mine_.doorbell.Ring(); }
  bool ReachesAll() const override { return true; }
  bool ArrivalsRing() const override { return true; }

 private:
  const std::shared_ptr<InprocMailboxes> mailboxes_;
  const int rank_;
  Mailbox& mine_;
};

}  // namespace

InprocHub::InprocHub(int size) : mailboxes_(std::make_shared<InprocMailboxes>(size)) {}

int InprocHub::size() const { return static_cast<int>(mailboxes_->of_rank.size()); }

std::unique_ptr<Transport> InprocHub::Connect(int rank) {
  return std::make_unique<InprocTransport>(mailboxes_, rank);
}

void InprocHub::Isolate(int rank) { mailboxes_->Of(rank).isolated = true; }

void InprocHub::Break(int rank, Status why) {
  Mailbox& mailbox = mailboxes_->Of(rank);
  {
    MutexLock lock(mailbox.mutex);
    if (mailbox.broken) return;
    mailbox.failure = std::move(why);
    mailbox.broken = true;
  }
  mailbox.doorbell.Ring();
}

}  // namespace sirtaki::core
