// How two ranks recognise each other on a new connection, before anything else is said or obeyed:
// each shows, by an HMAC over fresh challenges of both, that it knows the job's secret, which never
// crosses the connection.
//
//   caller                              called
//   magic, purpose, rank, size, challenge ->
//                                      <- its challenge and its proof
//   proof                              ->
//                                      <- length and text of why not; no text: welcome
//
// What follows is neither encrypted nor signed: who can change packets between two hosts can change
// that too.
#pragma once

// One thread runs each loop; the thread sanitizer knows no fences.
#define BOOST_ASIO_DISABLE_FENCED_BLOCK

#include <utility>  // that header of Boost lacks it

#include <boost/asio/awaitable.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/base/types.h"

namespace sirtaki::tcp {

namespace asio = boost::asio;
using Socket = std::shared_ptr<asio::ip::tcp::socket>;

// Whether the other end has closed the connection, or is gone.
bool HasHungUp(const Socket& socket);

// What a connection is for.
enum class Purpose : std::uint8_t { kMeeting, kControl, kUrgent, kBulk };

struct Caller {
  Purpose purpose = Purpose::kMeeting;
  int rank = -1;
  int size = 0;
};

// Longer than a greeting takes, also on a host that is overloaded.
inline constexpr auto kGreetingTime = std::chrono::seconds(10);

// A watch closes its socket at the deadline.
class Watch {
 public:
  Watch(const Socket& socket, core::TimePoint deadline);
  // The status of what has failed meanwhile: "no answer", if the watch has closed the socket.
  core::Status Judge(core::Status status) const;

 private:
  const core::TimePoint deadline_;
  asio::steady_timer timer_;
};

// The caller's side. Errors:
//   kProtocol         the other end is no rank of this job: it does not know the secret
//   kInvalidArgument  it is, and does not want this rank: its text
//   kPeerLost         the connection was closed, or the deadline has passed
asio::awaitable<core::Status> Greet(Socket socket, std::string secret, Caller self, int called,
                                    core::TimePoint deadline);

// The called side: sets `*caller` before it asks `judge`, whose text, if there is one, tells the
// caller why it is not wanted. Errors: as those of Greet.
asio::awaitable<core::Status> Answer(Socket socket, std::string secret, int self,
                                     std::function<std::string(const Caller&)> judge,
                                     core::TimePoint deadline, Caller* caller);

// Reads or writes all of it. kPeerLost with the system's text.
asio::awaitable<core::Status> ReadAll(Socket socket, void* memory, std::size_t bytes);
asio::awaitable<core::Status> WriteAll(Socket socket, const std::string& bytes);

// Sets what every connection of a job has: small messages go at once, children do not have it.
void Prepare(const Socket& socket);

}  // namespace sirtaki::tcp
