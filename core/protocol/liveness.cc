#include "core/protocol/liveness.h"

namespace sirtaki::core {

void Liveness::Heard(int neighbour, TimePoint now) {
  Neighbour& n = neighbours_[neighbour];
  n = {.heard = now};
}

Liveness::Verdict Liveness::Waiting(int neighbour, TimePoint since, TimePoint now) {
  Neighbour& n = neighbours_[neighbour];
  Verdict verdict;
  const Duration next_look = most_of_a_look_ / 2;
  if (n.pinged) {
    // The look that uses up the time does not judge: if it comes after a stop, the answer may lie
    // unread.
    verdict.lost = n.unanswered >= peer_timeout_ && now > n.looked;
    if (verdict.lost) return verdict;
    n.unanswered += std::min(now - n.looked, most_of_a_look_);
    n.looked = now;
    const Duration left = peer_timeout_ - n.unanswered;
    verdict.next = now + (left > Duration::zero() ? std::min(left, next_look) : next_look);
    return verdict;
  }
  // A wait that began after the last word of the neighbour counts from its own beginning.
  const TimePoint quiet_since = std::max(n.heard, since);
  if (now - quiet_since >= ping_interval_) {
    n.pinged = true;
    n.looked = now;
    verdict.ping = true;
    verdict.next = now + next_look;
  } else {
    verdict.next = quiet_since + ping_interval_;
  }
  return verdict;
}

Duration Liveness::Unanswered(int neighbour) const {
  const auto found = neighbours_.find(neighbour);
  return found == neighbours_.end() ? Duration::zero() : found->second.unanswered;
}

}  // namespace sirtaki::core
