// The engine's messages between ranks of a host by mailboxes in shared memory, and to the others by
// the medium's own transport. Sleepers sleep on this rank's bell in its session memory, which the
// others ring.
//
// A message goes as its length, then its bytes. It may be longer than the mailbox: then it goes in
// pieces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "core/protocol/transport.h"
#include "ops/shm/local_group.h"
#include "ops/shm/mailbox.h"

namespace sirtaki::ops::shm {

// What comes from beyond this host, which does not ring this rank's bell.
enum class Beyond : std::uint8_t {
  kNone,
  kFaults,    // other ranks may tell them themselves: looked at now and then, while somebody waits
  kMessages,  // of a neighbour in the tree: sleepers come back to look
};

class Transport final : public core::Transport {
 public:
  // Both must outlive the transport.
  Transport(LocalGroup& group, core::Transport& beyond, Beyond brings);

  void Send(int rank, core::Bytes bytes) override;
  std::optional<core::Incoming> TryReceive() override;
  bool Flush() override;
  core::Status health() const override { return failure_.ok() ? beyond_.health() : failure_; }

  std::uint64_t ArmDoorbell() override { return bell_.Load(); }
  bool WaitUntil(std::uint64_t ticket, core::TimePoint deadline) override;
  void Wake() override { bell_.Add(1); }
  bool ReachesAll() const override { return beyond_.ReachesAll(); }
  bool ArrivalsRing() const override { return brings_ != Beyond::kMessages; }

 private:
  struct Outbox {
    explicit Outbox(MailboxWriter to) : writer(to) {}

    MailboxWriter writer;
    std::deque<core::Bytes> waiting;
    std::size_t begun = 0;  // bytes of the first that have gone, with its length
  };
  struct Inbox {
    explicit Inbox(MailboxReader from) : reader(from) {}

    MailboxReader reader;
    std::optional<std::size_t> length;  // of the message that is on its way
    core::Bytes bytes;                  // of it, as far as they have come
  };

  std::byte* MailboxOf(int receiver, int sender) const;
  // Both tell by their return value whether the message is complete.
  static bool Write(Outbox& outbox, const core::Bytes& bytes);
  bool Read(int index, Inbox& inbox);
  void Push(int index, Outbox& outbox);
  std::optional<core::Incoming> ReceiveHere();
  std::optional<core::Incoming> ReceiveRarely();
  void Fail(core::StatusCode code, const std::string& text);

  LocalGroup& group_;
  core::Transport& beyond_;
  const Beyond brings_;
  SharedCounter& bell_;
  const MailboxLayout layout_;
  core::Status failure_;
  std::deque<core::Bytes> to_self_;
  std::vector<Outbox> outboxes_;  // by index in the group
  std::vector<Inbox> inboxes_;
  int waiting_ = 0;      // outboxes that are not empty
  int next_inbox_ = 0;   // where the next look begins, so that nobody is passed over
  std::uint32_t heard_;  // the bell when all inboxes were last found empty
  bool beyond_first_ = false;
  core::TimePoint look_beyond_{};  // the next of the rare looks
};

}  // namespace sirtaki::ops::shm
