#include "core/protocol/liveness.h"

namespace sirtaki::core {
namespace {

// An answer that lay unread when the time was over is read before the look that judges.
constexpr auto kLastLook = std::chrono::milliseconds(100);

}  // namespace

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
    verdict.lost = n.silent >= peer_timeout_ && now > n.looked;
    if (verdict.lost) return verdict;
    n.silent += std::min(now - n.looked, most_of_a_look_);
    n.looked = now;
    const Duration left = peer_timeout_ - n.silent;
    const Duration last_look = std::min<Duration>(next_look, kLastLook);
    verdict.next = now + (left > Duration::zero() ? std::min(left, next_look) : last_look);
    return verdict;
  }
  // A wait that began after the last word of the neighbour counts from its own beginning.
  const TimePoint quiet_since = std::max(n.heard, since);
  if (now - quiet_since >= ping_interval_) {
    n.pinged = true;
    n.looked = now;
    n.silent = std::min(ping_interval_, peer_timeout_ / 2);  // the answer has the rest of the time
    verdict.ping = true;
    verdict.next = now + next_look;
  } else {
    verdict.next = quiet_since + ping_interval_;
  }
  return verdict;
}

Duration Liveness::Silent(int neighbour) const {
  const auto found = neighbours_.find(neighbour);
  return found == neighbours_.end() ? Duration::zero() : found->second.silent;
}

}  // namespace sirtaki::core
