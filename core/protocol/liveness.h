// Whom to ping, and who is lost (rule 19). Pure. Nothing is sent when nobody waits.
//
// A neighbour is lost when it has been silent for the peer time-out while this rank waited and looked.
// Time in which this rank did not look counts for little: it may have been stopped, or have paused.
#pragma once

#include <algorithm>
#include <chrono>
#include <map>

#include "core/base/types.h"

namespace sirtaki::core {

class Liveness {
 public:
  Liveness(Duration ping_interval, Duration peer_timeout)
      : ping_interval_(ping_interval),
        peer_timeout_(peer_timeout),
        most_of_a_look_(std::min<Duration>(std::chrono::seconds(1), peer_timeout / 4)) {}

  // Anything that arrives from a neighbour proves that it lives.
  void Heard(int neighbour, TimePoint now);

  // This node waits for something that comes through `neighbour`, since `since`. Precondition: it has
  // received since the last call with an earlier `now`.
  struct Verdict {
    bool ping = false;  // send one now (it is noted as sent)
    bool lost = false;  // it was silent for the peer time-out, and did not answer
    TimePoint next{};   // when to ask again
  };
  Verdict Waiting(int neighbour, TimePoint since, TimePoint now);

  // How long a neighbour that was pinged has been silent, else zero; for texts.
  Duration Silent(int neighbour) const;

 private:
  struct Neighbour {
    TimePoint heard{};
    bool pinged = false;  // since it was heard
    TimePoint looked{};   // for the answer
    Duration silent{};    // as the looks have counted it
  };
  Duration ping_interval_;
  Duration peer_timeout_;
  Duration most_of_a_look_;
  std::map<int, Neighbour> neighbours_;
};

}  // namespace sirtaki::core
