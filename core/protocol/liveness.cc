#include "core/protocol/liveness.h"

#include <algorithm>

namespace sirtaki::core {

void Liveness::Heard(int neighbour, TimePoint now) {
  Neighbour& n = neighbours_[neighbour];
  n.heard = now;
  n.pinged.reset();
}

Liveness::Verdict Liveness::Waiting(int neighbour, TimePoint since, TimePoint now) {
  Neighbour& n = neighbours_[neighbour];
  Verdict verdict;
  if (n.pinged) {
    verdict.lost = now - *n.pinged >= peer_timeout_;
    verdict.next = *n.pinged + peer_timeout_;
    return verdict;
  }
  // A wait that began after the last word of the neighbour counts from its own beginning.
  const TimePoint quiet_since = std::max(n.heard, since);
  if (now - quiet_since >= ping_interval_) {
    n.pinged = now;
    verdict.ping = true;
    verdict.next = now + peer_timeout_;
  } else {
    verdict.next = quiet_since + ping_interval_;
  }
  return verdict;
}

Duration Liveness::Unanswered(int neighbour, TimePoint now) const {
  const auto found = neighbours_.find(neighbour);
  if (found == neighbours_.end() || !found->second.pinged) return Duration::zero();
  return now - *found->second.pinged;
}

}  // namespace sirtaki::core
