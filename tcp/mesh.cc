#include "tcp/mesh.h"

#include <fcntl.h>

#include <algorithm>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <utility>

namespace sirtaki::tcp {

using asio::ip::tcp;
using core::Clock;
using core::Status;
using core::StatusCode;
using core::TimePoint;
using Error = boost::system::error_code;

std::string NumbersText(const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kMost); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return ranks.size() <= kMost ? text
                               : text + " and " + std::to_string(ranks.size() - kMost) + " more";
}

std::string NameOf(int rank, const std::vector<std::string>& hosts) {
  return "rank " + std::to_string(rank) + " on host " + hosts[static_cast<std::size_t>(rank)];
}

Mesh::Mesh(Tasks& tasks, Door& door, const Place& place, const std::vector<std::string>& hosts,
           std::string secret, TimePoint deadline)
    : tasks_(tasks),
      door_(door),
      rank_(place.rank),
      size_(place.size),
      hosts_(hosts),
      secret_(std::move(secret)),
      deadline_(deadline),
      sockets_(static_cast<std::size_t>(place.size)),
      left_(static_cast<int>(kLines) * (place.size - 1)) {}

// kBackend: the system refuses the call. kPeerLost: it may have been held up.
asio::awaitable<Status> Mesh::CallOnce(Socket socket, int rank, Purpose purpose,
                                       tcp::endpoint end) {
  const TimePoint by = std::min<TimePoint>(deadline_, Clock::now() + kGreetingTime);
  Error error;
  {
    const Watch watch(socket, by);
    co_await socket->async_connect(end, asio::redirect_error(asio::use_awaitable, error));
    if (error && Clock::now() < by) co_return Status(StatusCode::kBackend, error.message());
    if (error) co_return watch.Judge({StatusCode::kPeerLost, error.message()});
  }
  Prepare(socket);
  co_return co_await Greet(socket, secret_, {purpose, rank_, size_}, rank, by);
}

asio::awaitable<void> Mesh::Call(int rank, Purpose purpose, tcp::endpoint end) {
  TimePoint refused_since = TimePoint::max();
  while (Clock::now() < deadline_ && failure_.ok()) {
    const auto socket = std::make_shared<tcp::socket>(tasks_.io());
    const TimePoint begun = Clock::now();
    const Status status = co_await CallOnce(socket, rank, purpose, end);
    if (status.ok()) {
      sockets_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(purpose) - 1] = socket;
      --left_;
      co_return;
    }
    why_ = NameOf(rank_, hosts_) + " cannot connect to " + NameOf(rank, hosts_) + " at " +
           TextOf(end) + ": " + status.message();
    why_rank_ = rank;
    const bool is_refused = status.code() == StatusCode::kBackend;
    if (is_refused || status.code() == StatusCode::kPeerLost) {
      why_ += "; a firewall may be between: the hosts have to reach each other at every port";
    }
    refused_since = is_refused ? std::min(refused_since, begun) : TimePoint::max();
    const bool is_final = is_refused ? Clock::now() - refused_since >= kRefusedForGood
                                     : status.code() != StatusCode::kPeerLost;
    if (is_final) {
      failure_ = {status.code(), why_, {rank, {}, {}}};
      co_return;
    }
    co_await Sleep(kTryAgain);
  }
}

// A caller's socket goes there; null: it has no business here. One that has hung up since may call again.
Socket* Mesh::SeatOf(const Caller& caller) {
  const auto line = static_cast<std::size_t>(caller.purpose) - 1;
  if (caller.rank <= rank_ || caller.rank >= size_ || line >= kLines) return nullptr;
  Socket* seat = &sockets_[static_cast<std::size_t>(caller.rank)][line];
  if (*seat && !HasHungUp(*seat)) return nullptr;
  if (std::exchange(*seat, nullptr)) ++left_;
  return seat;
}

Status Mesh::Connect(const std::vector<tcp::endpoint>& ends) {
  door_.Receive({secret_, deadline_,
                 [this](const Caller& caller) {
                   return SeatOf(caller) != nullptr ? "" : "nobody expects it";
                 },
                 [this](const Caller& caller, Socket socket) {
                   Socket* const seat = SeatOf(caller);
                   if (seat == nullptr) return;
                   *seat = std::move(socket);
                   --left_;
                 },
                 [](const std::string&) {}});
  for (int rank = 0; rank < rank_; ++rank) {
    for (const Purpose purpose : {Purpose::kControl, Purpose::kUrgent, Purpose::kBulk}) {
      tasks_.Spawn(Call(rank, purpose, ends[static_cast<std::size_t>(rank)]));
    }
  }
  tasks_.Drive(deadline_, [this] { return left_ == 0 || is_stopped_ || !failure_.ok(); });
  door_.Close();
  if (!tasks_.failure().ok()) return tasks_.failure();
  return failure_.ok() && left_ > 0 ? WhyIncomplete() : failure_;
}

Status Mesh::WhyIncomplete() const {
  if (is_stopped_) return {StatusCode::kAborted, "another rank has failed during the start"};
  std::vector<int> missing;
  for (int rank = 0; rank < size_; ++rank) {
    const auto& there = sockets_[static_cast<std::size_t>(rank)];
    if (rank != rank_ && std::ranges::find(there, nullptr) != there.end()) missing.push_back(rank);
  }
  // The rank of the last call that failed may have been reached later.
  if (std::ranges::find(missing, why_rank_) != missing.end()) {
    return {StatusCode::kBackend, why_, {why_rank_, {}, {}}};
  }
  return {StatusCode::kTimedOut,
          NameOf(rank_, hosts_) + " has no connection with " + NumbersText(missing) +
              " within start_timeout" + door_.StrangersText(),
          {missing.empty() ? -1 : missing.front(), {}, {}}};
}

std::vector<Lines> Mesh::Release() {
  std::vector<Lines> lines;
  for (auto& there : sockets_) {
    std::array<Line, kLines> fds;
    for (std::size_t line = 0; line < kLines; ++line) {
      if (!there[line]) continue;
      fds[line] = Line(core::Descriptor(there[line]->release()));
      fcntl(fds[line].get(), F_SETFL, O_RDWR | O_NONBLOCK);
    }
    lines.push_back({std::move(fds[0]), std::move(fds[1]), std::move(fds[2])});
  }
  return lines;
}

}  // namespace sirtaki::tcp
