// The engine's messages over connections of TCP, one to each other rank.
//
// A lost rank is noticed here when its connection ends, whether or not anybody waits for it. See
// core/protocol/transport.h for who may call what.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "core/protocol/transport.h"
#include "core/threads/doorbell.h"
#include "tcp/line.h"
#include "tcp/loss.h"

namespace sirtaki::tcp {

class Transport final : public core::Transport {
 public:
  // `lines`: the connections by rank, which do not block; this rank has none. `hosts`: their names,
  // for texts.
  Transport(int rank, std::vector<Line> lines, std::vector<std::string> hosts);

  // After SayFarewell it waits for the others' for a moment, so that nothing that is on its way is
  // lost.
  ~Transport() override;

  // All ranks have left: the end of a connection is no loss from here on, on either side.
  void SayFarewell() { farewell_ = true; }

  // A message of 4 GiB or more is a failure.
  void Send(int rank, core::Bytes bytes) override;
  std::optional<core::Incoming> TryReceive() override;
  bool Flush() override;
  core::Status health() const override { return health_.ok() ? loss_.status() : health_; }

  std::uint64_t ArmDoorbell() override { return doorbell_.Arm(); }
  bool WaitUntil(std::uint64_t ticket, core::TimePoint deadline) override {
    return doorbell_.WaitUntil(ticket, deadline);
  }
  void Wake() override { doorbell_.Ring(); }
  bool ReachesAll() const override { return true; }
  bool ArrivalsRing() const override { return false; }

 private:
  struct Peer {
    Line line;
    core::Bytes outbox;  // not sent yet, from `sent` on
    std::size_t sent = 0;
    core::Bytes inbox;    // of messages that are not whole yet
    int write_error = 0;  // after which nothing can be sent
    bool said_farewell = false;
  };

  void Push(int rank);          // as much of the outbox as goes now
  bool Pull(int rank);          // takes what is there; false: nothing
  void TakeMessages(int rank);  // out of the inbox
  void Lose(int rank, int error);
  bool AwaitFarewells();

  const int rank_;
  const std::vector<std::string> hosts_;
  core::Status health_;
  Loss loss_;
  bool farewell_ = false;
  core::Doorbell doorbell_;
  core::Descriptor ready_;  // an epoll of all lines
  std::vector<Peer> peers_;
  core::Bytes stage_;        // where lines are read to
  std::size_t sending_ = 0;  // peers with something in their outbox
  std::deque<core::Incoming> received_;
};

}  // namespace sirtaki::tcp
