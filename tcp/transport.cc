#include "tcp/transport.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <utility>

namespace sirtaki::tcp {
namespace {

using core::Bytes;
using core::Incoming;
using core::StatusCode;

// Before each message stands its length; a farewell has none that a message can have.
using Length = std::uint32_t;
constexpr Length kFarewell = std::numeric_limits<Length>::max();

constexpr std::size_t kReadBytes = std::size_t{64} << 10;
constexpr int kMostReady = 64;  // lines at a look
constexpr auto kFarewellTime = std::chrono::milliseconds(500);

void Append(Bytes* bytes, const void* memory, std::size_t count) {
  const auto* first = static_cast<const std::byte*>(memory);
  bytes->insert(bytes->end(), first, first + count);
}

}  // namespace

Transport::Transport(int rank, std::vector<Line> lines, std::vector<std::string> hosts)
    : rank_(rank),
      hosts_(std::move(hosts)),
      ready_(epoll_create1(EPOLL_CLOEXEC)),
      stage_(kReadBytes) {
  peers_.resize(lines.size());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    peers_[i].line = std::move(lines[i]);
    if (!peers_[i].line.valid()) continue;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = i;
    if (epoll_ctl(ready_.get(), EPOLL_CTL_ADD, peers_[i].line.get(), &event) != 0) {
      health_ = {StatusCode::kBackend, std::string("epoll: ") + std::strerror(errno)};
    }
  }
}

Transport::~Transport() {
  if (farewell_) {
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      if (!peers_[i].line.valid()) continue;
      const bool was_empty = peers_[i].outbox.empty();
      Append(&peers_[i].outbox, &kFarewell, sizeof(kFarewell));
      if (was_empty) ++sending_;
    }
    const core::TimePoint deadline = core::Clock::now() + kFarewellTime;
    std::array<epoll_event, 1> event{};
    while (!(Flush() && AwaitFarewells()) && core::Clock::now() < deadline) {
      epoll_wait(ready_.get(), event.data(), 1, 1);
    }
  }
}

// Takes, and forgets, what is still there: a connection that is closed with unread bytes takes along
// what the other end has not read.
bool Transport::AwaitFarewells() {
  bool all = true;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    if (!peers_[i].line.valid()) continue;
    while (Pull(static_cast<int>(i))) received_.clear();
    if (peers_[i].said_farewell && peers_[i].outbox.empty()) peers_[i].line.Close();
    all = all && !peers_[i].line.valid();
  }
  return all;
}

void Transport::Lose(int rank, int error) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.outbox.empty()) --sending_;
  peer.outbox.clear();
  peer.sent = 0;
  peer.line.Close();
  if (!peer.said_farewell && !farewell_)
    loss_.Note(rank, hosts_[static_cast<std::size_t>(rank)], error);
}

void Transport::Send(int rank, Bytes bytes) {
  if (rank == rank_) {
    received_.push_back({rank_, std::move(bytes)});
    return;
  }
  if (bytes.size() >= kFarewell) {
    if (health_.ok()) {
      health_ = {StatusCode::kBackend, "a message of " + std::to_string(bytes.size()) +
                                           " bytes to rank " + std::to_string(rank) +
                                           " is too long for the TCP medium"};
    }
    return;
  }
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.line.valid()) return;
  const auto length = static_cast<Length>(bytes.size());
  const bool was_empty = peer.outbox.empty();
  Append(&peer.outbox, &length, sizeof(length));
  Append(&peer.outbox, bytes.data(), bytes.size());
  if (!was_empty) return;
  ++sending_;
  Push(rank);
}

void Transport::Push(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  while (peer.sent < peer.outbox.size()) {
    const ssize_t went = send(peer.line.get(), peer.outbox.data() + peer.sent,
                              peer.outbox.size() - peer.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (went < 0 && IsForLater(errno)) return;
    if (went < 0) {
      // Reading takes what the other end has said before, and then notes the loss.
      if (peer.write_error == 0) peer.write_error = errno;
      shutdown(peer.line.get(), SHUT_RDWR);
      break;
    }
    peer.sent += static_cast<std::size_t>(went);
  }
  peer.outbox.clear();
  peer.sent = 0;
  --sending_;
}

bool Transport::Flush() {
  for (std::size_t i = 0; sending_ > 0 && i < peers_.size(); ++i) {
    if (!peers_[i].outbox.empty()) Push(static_cast<int>(i));
  }
  return sending_ == 0;
}

std::optional<Incoming> Transport::TryReceive() {
  if (sending_ > 0) Flush();
  if (received_.empty() && ready_.valid()) {
    std::array<epoll_event, kMostReady> events{};
    const int count = epoll_wait(ready_.get(), events.data(), kMostReady, 0);
    for (int i = 0; i < count; ++i)
      Pull(static_cast<int>(events[static_cast<std::size_t>(i)].data.u64));
  }
  if (received_.empty()) return std::nullopt;
  Incoming incoming = std::move(received_.front());
  received_.pop_front();
  return incoming;
}

bool Transport::Pull(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.line.valid()) return false;
  const ssize_t came = recv(peer.line.get(), stage_.data(), stage_.size(), MSG_DONTWAIT);
  const int error = errno;
  if (came > 0) {
    Append(&peer.inbox, stage_.data(), static_cast<std::size_t>(came));
    TakeMessages(rank);
    return true;
  }
  if (came == 0 || !IsForLater(error)) Lose(rank, came == 0 ? peer.write_error : error);
  return false;
}

void Transport::TakeMessages(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  std::size_t at = 0;
  while (peer.inbox.size() - at >= sizeof(Length)) {
    Length length = 0;
    std::memcpy(&length, peer.inbox.data() + at, sizeof(length));
    if (length == kFarewell) {
      peer.said_farewell = true;
      at += sizeof(length);
      continue;
    }
    if (peer.inbox.size() - at - sizeof(length) < length) break;
    const auto first = peer.inbox.begin() + static_cast<std::ptrdiff_t>(at + sizeof(length));
    received_.push_back({rank, Bytes(first, first + static_cast<std::ptrdiff_t>(length))});
    at += sizeof(length) + length;
  }
  peer.inbox.erase(peer.inbox.begin(), peer.inbox.begin() + static_cast<std::ptrdiff_t>(at));
}

}  // namespace sirtaki::tcp
