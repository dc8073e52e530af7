// A door is where a rank listens: whoever comes is asked who it is, and strangers keep nobody out.
#pragma once

#include "tcp/greeting.h"

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::tcp {

// Coroutines that one thread runs while it waits for them, and the failure that ends them all.
class Tasks {
 public:
  // `why_over`: asked while they run; what is not empty is their failure, as kAborted. May be empty itself.
  explicit Tasks(std::function<std::string()> why_over = {}) : why_over_(std::move(why_over)) {}
  void Spawn(asio::awaitable<void> task);
  // Runs them until `done`, a failure or the deadline, which is no failure yet.
  void Drive(core::TimePoint deadline, const std::function<bool()>& done);
  // The first one stays.
  void Fail(core::Status why) {
    if (failure_.ok()) failure_ = std::move(why);
  }
  const core::Status& failure() const { return failure_; }
  asio::io_context& io() { return io_; }

 private:
  const std::function<std::string()> why_over_;
  core::Status failure_;
  asio::io_context io_{1};
  asio::executor_work_guard<asio::io_context::executor_type> work_{io_.get_executor()};
};

asio::awaitable<void> Sleep(core::Duration time);

// An address of IPv4 that is written as one of IPv6 becomes itself.
asio::ip::address Plain(const asio::ip::address& address);
std::string TextOf(const asio::ip::tcp::endpoint& end);

class Door {
 public:
  // What is done with those that come: `judge` as for Answer, `take` those that are welcome;
  // `refused` when a rank of this job has learned why it is not.
  struct Rules {
    std::string secret;
    core::TimePoint deadline;
    std::function<std::string(const Caller&)> judge;
    std::function<void(const Caller&, Socket)> take;
    std::function<void(const std::string&)> refused;
  };

  // `most_ranks`: connections that ranks may be making at once.
  Door(Tasks& tasks, int own_rank, std::size_t most_ranks)
      : tasks_(tasks), own_rank_(own_rank), most_ranks_(most_ranks) {}

  // Listens at all addresses of this host; at the loopback's alone if `address` is one. Port 0: any.
  core::Status Open(const std::string& address, int port);
  int port() const;
  void Receive(Rules rules);
  // Nobody is taken any more.
  void Close();
  // What is to be said of those who were refused; empty: nobody was.
  std::string StrangersText() const;

 private:
  using Acceptor = std::shared_ptr<asio::ip::tcp::acceptor>;
  asio::awaitable<void> AcceptAll(Acceptor acceptor, Rules rules);
  asio::awaitable<void> AnswerOne(Socket socket, Rules rules);
  void MakeRoom(const Socket& socket);

  Tasks& tasks_;
  const int own_rank_;
  const std::size_t most_ranks_;
  Acceptor acceptor_;
  std::deque<std::weak_ptr<asio::ip::tcp::socket>> greeting_;
  int strangers_ = 0;
  std::string stranger_;
};

}  // namespace sirtaki::tcp
