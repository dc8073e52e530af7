#include "tcp/door.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <exception>
#include <sstream>
#include <utility>

namespace sirtaki::tcp {

using asio::ip::tcp;
using core::Clock;
using core::Status;
using core::StatusCode;
using core::TimePoint;
using Error = boost::system::error_code;

namespace {

constexpr auto kAskWhetherOver = std::chrono::milliseconds(20);

constexpr auto kAcceptAgain = std::chrono::milliseconds(50);
// Connections that have not proven themselves yet, beside those of ranks.
constexpr std::size_t kMostStrangers = 64;

// Whether an address is one where no other host can come.
bool IsOnlyHere(const std::string& address) {
  Error error;
  const auto number = asio::ip::make_address(address, error);
  return address == "localhost" || (!error && Plain(number).is_loopback());
}

Status Listen(bool only_here, const std::string& address, int port, tcp::acceptor* acceptor) {
  const auto number = static_cast<unsigned short>(port);
  Error error;
  tcp::endpoint end(tcp::v6(), number);
  if (only_here) {
    const auto given = asio::ip::make_address(address, error);
    end = {error ? asio::ip::make_address("127.0.0.1") : given, number};
  }
  error = {};
  acceptor->open(end.protocol(), error);
  if (error && !only_here) {  // without IPv6
    end = {tcp::v4(), number};
    acceptor->open(end.protocol(), error);
  }
  if (!error && !only_here && end.protocol() == tcp::v6()) {
    acceptor->set_option(asio::ip::v6_only(false), error);
  }
  if (!error) acceptor->set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) fcntl(acceptor->native_handle(), F_SETFD, FD_CLOEXEC);
  if (!error) acceptor->bind(end, error);
  if (!error) acceptor->listen(SOMAXCONN, error);
  return error ? Status(StatusCode::kBackend, error.message()) : Status::Ok();
}

}  // namespace

void Tasks::Spawn(asio::awaitable<void> task) {
  asio::co_spawn(io_, std::move(task), [this](const std::exception_ptr& thrown) {
    if (!thrown) return;
    try {
      std::rethrow_exception(thrown);
    } catch (...) {
      Fail(core::StatusOfException());
    }
  });
}

void Tasks::Drive(TimePoint deadline, const std::function<bool()>& done) {
  while (failure_.ok() && !done() && Clock::now() < deadline) {
    if (!why_over_) {
      io_.run_one_until(deadline);
      continue;
    }
    if (std::string why = why_over_(); !why.empty())
      Fail({core::StatusCode::kAborted, std::move(why)});
    io_.run_one_until(std::min<TimePoint>(deadline, Clock::now() + kAskWhetherOver));
  }
}

asio::awaitable<void> Sleep(core::Duration time) {
  asio::steady_timer timer(co_await asio::this_coro::executor, time);
  Error ignored;
  co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
}

asio::ip::address Plain(const asio::ip::address& address) {
  if (!address.is_v6() || !address.to_v6().is_v4_mapped()) return address;
  return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
}

std::string TextOf(const tcp::endpoint& end) {
  std::ostringstream text;
  text << tcp::endpoint(Plain(end.address()), end.port());
  return text.str();
}

Status Door::Open(const std::string& address, int port) {
  acceptor_ = std::make_shared<tcp::acceptor>(tasks_.io());
  return Listen(IsOnlyHere(address), address, port, acceptor_.get());
}

int Door::port() const {
  Error ignored;
  return acceptor_->local_endpoint(ignored).port();
}

void Door::Receive(Rules rules) { tasks_.Spawn(AcceptAll(acceptor_, std::move(rules))); }

asio::awaitable<void> Door::AcceptAll(Acceptor acceptor, Rules rules) {
  for (;;) {
    const auto socket = std::make_shared<tcp::socket>(tasks_.io());
    Error error;
    co_await acceptor->async_accept(*socket, asio::redirect_error(asio::use_awaitable, error));
    if (!acceptor->is_open()) co_return;
    if (error) {
      co_await Sleep(kAcceptAgain);  // there may be no room for it now
      continue;
    }
    Prepare(socket);
    MakeRoom(socket);
    tasks_.Spawn(AnswerOne(socket, rules));
  }
}

asio::awaitable<void> Door::AnswerOne(Socket socket, Rules rules) {
  Caller caller;
  Error ignored;
  const std::string from = TextOf(socket->remote_endpoint(ignored));
  const TimePoint deadline = std::min<TimePoint>(rules.deadline, Clock::now() + kGreetingTime);
  const Status status =
      co_await Answer(socket, rules.secret, own_rank_, rules.judge, deadline, &caller);
  std::erase_if(greeting_, [&](const auto& one) { return one.lock() == socket; });
  // It may have been closed when all was said.
  if (status.ok() && socket->is_open()) co_return rules.take(caller, socket);
  if (status.code() == StatusCode::kInvalidArgument) rules.refused(status.message());
  if (status.code() != StatusCode::kProtocol) co_return;
  ++strangers_;
  stranger_ = from + ": " + status.message();
}

// The oldest goes where too many connections have proven nothing.
void Door::MakeRoom(const Socket& socket) {
  greeting_.push_back(socket);
  if (greeting_.size() <= kMostStrangers + most_ranks_) return;
  Error ignored;
  if (const Socket oldest = greeting_.front().lock()) oldest->close(ignored);
  greeting_.pop_front();
}

void Door::Close() {
  Error ignored;
  acceptor_->close(ignored);
  tasks_.io().poll();  // takes those that have heard that they are welcome
  for (const auto& one : greeting_) {
    if (const Socket socket = one.lock()) socket->close(ignored);
  }
  greeting_.clear();
  tasks_.io().poll();  // what waited there ends
}

std::string Door::StrangersText() const {
  if (strangers_ == 0) return {};
  return "; " + std::to_string(strangers_) + " connections were refused, the last from " +
         stranger_;
}

}  // namespace sirtaki::tcp
