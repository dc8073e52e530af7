// Whom to ping, and who is lost (rule 19). Pure. Nothing is sent when nobody waits.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "core/base/types.h"

namespace sirtaki::core {

class Liveness {
 public:
  Liveness(Duration ping_interval, Duration peer_timeout)
      : ping_interval_(ping_interval), peer_timeout_(peer_timeout) {}

  // Anything that arrives from a neighbour proves that it lives.
  void Heard(int neighbour, TimePoint now);

  // This node waits for something that comes through `neighbour`, since `since`.
  struct Verdict {
    bool ping = false;  // send one now (it is noted as sent)
    bool lost = false;  // it did not answer within the peer time-out
    TimePoint next{};   // when to ask again
  };
  Verdict Waiting(int neighbour, TimePoint since, TimePoint now);

  // How long a ping has been unanswered, zero if none is; for texts.
  Duration Unanswered(int neighbour, TimePoint now) const;

 private:
  struct Neighbour {
    TimePoint heard{};
    std::optional<TimePoint> pinged;  // unanswered
  };
  Duration ping_interval_;
  Duration peer_timeout_;
  std::map<int, Neighbour> neighbours_;
};

}  // namespace sirtaki::core
