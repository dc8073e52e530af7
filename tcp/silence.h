// A silence is the time for which the system of another rank has acknowledged nothing, while this rank
// waits on a connection with it. A host or a link that is gone ends no connection, so only this tells.
//
// It is the systems that acknowledge: a process that is stopped, or busy, is not silent here
// (core/protocol/liveness.h knows of those). Nothing is sent, and nothing counts, while nobody waits.
// TCP_USER_TIMEOUT would not do: it also ends a connection whose other end takes nothing for a while.
#pragma once

#include <chrono>
#include <optional>

#include "core/base/types.h"

namespace sirtaki::tcp {

// A rank that waits, and has had no acknowledgement for the ping interval, sends a ping, which the other
// system acknowledges. The other rank is lost after the peer time-out, in which acknowledgements that
// TCP delays, and packets that it sends again, have to come: it is 1 s at least.
struct Patience {
  core::Duration ping_interval = std::chrono::seconds(2);
  core::Duration peer_timeout = std::chrono::seconds(10);
};

// What the system knows of a connection.
struct Acknowledged {
  bool is_asked = false;  // something was sent that is not acknowledged yet
  bool has_more = false;  // something is to be sent when the other end takes it
  core::Duration ago{};   // since the other end has acknowledged anything
};
// Nothing where it is no connection of TCP.
std::optional<Acknowledged> AcknowledgedOn(int fd);

class Silence {
 public:
  explicit Silence(Patience patience);

  // This rank begins to wait, after a time in which it did not.
  void Begin() { next_ = core::TimePoint::min(); }
  // Says whether to look now. The first look is never due at once: most waits are short.
  bool IsDue(core::TimePoint now);

  enum class Verdict { kWell, kPing, kLost };
  // Precondition: it is due. Time between two looks counts for little: this rank may have been stopped.
  // kPing: one is to be sent now (it is noted as sent).
  Verdict Look(const Acknowledged& known, core::TimePoint now);

  core::Duration lasts() const { return silent_; }

 private:
  const Patience patience_;
  const core::Duration most_of_a_look_;
  core::TimePoint next_ = core::TimePoint::min();  // look; min: the wait has not been seen yet
  core::TimePoint looked_{};
  core::Duration silent_{};
};

}  // namespace sirtaki::tcp
