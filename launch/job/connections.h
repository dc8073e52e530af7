// The connections of a run to its ranks, and those that have not proven that they are ranks', which
// are few and do not stay: strangers cannot keep ranks out.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"
#include "launch/base/greeting.h"
#include "launch/base/rank_messages.h"
#include "launch/base/sockets.h"

namespace sirtaki::launch {

struct Connection {
  Connection(Descriptor accepted, const std::string& key, core::TimePoint until)
      : fd(std::move(accepted)), keeper(key, OwnEndpoint(fd)), silent_by(until) {}

  Descriptor fd;
  Doorkeeper keeper;
  MessageReader reader{kMaxGreeting};  // until it is known
  std::string outbox;
  int rank = -1;              // until it has said which it is
  core::TimePoint silent_by;  // then: it is no rank of ours
};

class Connections {
 public:
  // At most `most_greeters` at once have proven nothing.
  explicit Connections(std::size_t most_greeters) : most_greeters_(most_greeters) {}

  // Listens, on the loopback alone if `local`, for those that know the key.
  core::Status Open(bool local, std::string key, int* port);
  // What can be read when a connection waits; -1 while there is no room for one.
  int accept_fd() const { return accept_at_ ? -1 : listener_.get(); }
  // Takes connections that wait. Where there are too many, or there is no room, the oldest of those
  // that have proven nothing is closed.
  void AcceptAll(core::TimePoint now);
  // Closes those that have not said in time which rank they are.
  void CheckTimes(core::TimePoint now);
  // The next time that changes something.
  std::optional<core::TimePoint> NextTime() const;

  // In the order in which they came; closed ones too, until they are removed.
  const std::vector<std::unique_ptr<Connection>>& all() const { return all_; }
  void RemoveClosed();

 private:
  std::size_t Greeters() const;
  bool CloseOldestGreeter();  // false if there is none

  const std::size_t most_greeters_;
  std::string key_;
  Descriptor listener_;
  std::optional<core::TimePoint> accept_at_;  // again
  std::vector<std::unique_ptr<Connection>> all_;
};

}  // namespace sirtaki::launch
