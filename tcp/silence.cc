#include "tcp/silence.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>

namespace sirtaki::tcp {
namespace {

constexpr core::Duration kLeastPatience = std::chrono::seconds(1);
constexpr core::Duration kLongestLook = std::chrono::seconds(1);

}  // namespace

std::optional<Acknowledged> AcknowledgedOn(int fd) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  int unsent = 0;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return std::nullopt;
  if (ioctl(fd, SIOCOUTQNSD, &unsent) != 0) return std::nullopt;
  return Acknowledged{info.tcpi_unacked > 0 || info.tcpi_probes > 0 || info.tcpi_retransmits > 0,
                      unsent > 0, std::chrono::milliseconds(info.tcpi_last_ack_recv)};
}

Silence::Silence(Patience patience)
    : patience_{patience.ping_interval, std::max(patience.peer_timeout, kLeastPatience)},
      most_of_a_look_(
          std::min({kLongestLook, patience_.peer_timeout / 4, patience_.ping_interval})) {}

bool Silence::IsDue(core::TimePoint now) {
  if (next_ != core::TimePoint::min()) return now >= next_;
  looked_ = now;
  next_ = now + most_of_a_look_;
  silent_ = core::Duration::zero();
  return false;
}

Silence::Verdict Silence::Look(const Acknowledged& known, core::TimePoint now) {
  const core::Duration passed = now - looked_;
  looked_ = now;
  next_ = now + most_of_a_look_;
  if (known.is_asked && known.ago >= passed) {
    silent_ += std::min(passed, most_of_a_look_);
    return silent_ >= patience_.peer_timeout ? Verdict::kLost : Verdict::kWell;
  }
  silent_ = core::Duration::zero();
  if (known.is_asked || known.has_more || known.ago < patience_.ping_interval) {
    return Verdict::kWell;
  }
  // The acknowledgement has the rest of the time.
  silent_ = std::min(patience_.ping_interval, patience_.peer_timeout / 2);
  return Verdict::kPing;
}

}  // namespace sirtaki::tcp
