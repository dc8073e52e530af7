#include "tcp/greeting.h"

#include <fcntl.h>
#include <poll.h>

#include <array>
#include <bit>
#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <cstring>
#include <utility>

#include "core/base/hmac.h"

namespace sirtaki::tcp {

using core::Status;
using core::StatusCode;
using Error = boost::system::error_code;

namespace {

static_assert(std::endian::native == std::endian::little, "numbers go as they lie in memory");

constexpr std::size_t kChallengeBytes = 32;
constexpr std::array<char, 8> kMagic = {'S', 'i', 'r', 't', 'a', 'k', 'i', '1'};
constexpr std::size_t kLongestReason = 1000;

struct Opening {
  std::array<char, 8> magic = kMagic;
  std::uint32_t purpose = 0;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::array<char, kChallengeBytes> challenge{};
};
struct Reply {
  std::array<char, kChallengeBytes> challenge{};
  std::array<char, core::kHashBytes> proof{};
};

template <typename T>
std::string BytesOf(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

// Each side signs other words, so that none can be used to answer the other; and all that was said,
// so that nothing of it can be changed.
std::string Proof(const std::string& secret, const char* who, const Opening& opening, int called,
                  const std::array<char, kChallengeBytes>& of_called) {
  const core::Hash hash = core::HmacSha256(
      secret, who + BytesOf(opening) + std::to_string(called) + ":" + BytesOf(of_called));
  return BytesOf(hash);
}

Status MakeChallenge(std::array<char, kChallengeBytes>* challenge) {
  const std::string random = core::RandomBytes(kChallengeBytes);
  if (random.empty()) return {StatusCode::kBackend, "the system gives no random numbers"};
  std::memcpy(challenge->data(), random.data(), random.size());
  return Status::Ok();
}

Status Stranger(const char* what) { return {StatusCode::kProtocol, what}; }

}  // namespace

Watch::Watch(const Socket& socket, core::TimePoint deadline)
    : deadline_(deadline), timer_(socket->get_executor(), deadline) {
  timer_.async_wait([weak = std::weak_ptr(socket)](const Error& error) {
    const Socket watched = weak.lock();
    Error ignored;
    if (!error && watched) watched->close(ignored);
  });
}

Status Watch::Judge(Status status) const {
  if (status.code() != StatusCode::kPeerLost || core::Clock::now() < deadline_) return status;
  return {StatusCode::kPeerLost, "no answer"};
}

bool HasHungUp(const Socket& socket) {
  pollfd ended{socket->native_handle(), POLLRDHUP, 0};
  return poll(&ended, 1, 0) != 0;
}

void Prepare(const Socket& socket) {
  Error ignored;
  socket->set_option(asio::ip::tcp::no_delay(true), ignored);
  fcntl(socket->native_handle(), F_SETFD, FD_CLOEXEC);
}

asio::awaitable<Status> ReadAll(Socket socket, void* memory, std::size_t bytes) {
  Error error;
  co_await asio::async_read(*socket, asio::buffer(memory, bytes),
                            asio::redirect_error(asio::use_awaitable, error));
  if (!error) co_return Status::Ok();
  co_return Status(StatusCode::kPeerLost, error.message());
}

asio::awaitable<Status> WriteAll(Socket socket, const std::string& bytes) {
  Error error;
  co_await asio::async_write(*socket, asio::buffer(bytes),
                             asio::redirect_error(asio::use_awaitable, error));
  if (!error) co_return Status::Ok();
  co_return Status(StatusCode::kPeerLost, error.message());
}

asio::awaitable<Status> Greet(Socket socket, std::string secret, Caller self, int called,
                              core::TimePoint deadline) {
  const Watch watch(socket, deadline);
  Opening opening{
      .purpose = static_cast<std::uint32_t>(self.purpose), .rank = self.rank, .size = self.size};
  Status status = MakeChallenge(&opening.challenge);
  if (status.ok()) status = co_await WriteAll(socket, BytesOf(opening));
  Reply reply;
  if (status.ok()) status = co_await ReadAll(socket, &reply, sizeof(reply));
  if (!status.ok()) co_return watch.Judge(status);
  if (!core::IsSame(BytesOf(reply.proof),
                    Proof(secret, "called", opening, called, reply.challenge))) {
    co_return Stranger("it does not know this job's secret (SIRTAKI_SECRET)");
  }
  status = co_await WriteAll(socket, Proof(secret, "caller", opening, called, reply.challenge));
  std::uint16_t length = 0;
  if (status.ok()) status = co_await ReadAll(socket, &length, sizeof(length));
  if (!status.ok() || length == 0) co_return watch.Judge(status);
  std::string why_not(std::min<std::size_t>(length, kLongestReason), '\0');
  status = co_await ReadAll(socket, why_not.data(), why_not.size());
  if (!status.ok()) co_return status;
  co_return Status(StatusCode::kInvalidArgument, why_not);
}

asio::awaitable<Status> Answer(Socket socket, std::string secret, int self,
                               std::function<std::string(const Caller&)> judge,
                               core::TimePoint deadline, Caller* caller) {
  const Watch watch(socket, deadline);
  Opening opening;
  Status status = co_await ReadAll(socket, &opening, sizeof(opening));
  if (!status.ok()) co_return status;
  if (opening.magic != kMagic) co_return Stranger("it does not speak as ranks do");
  Reply reply;
  status = MakeChallenge(&reply.challenge);
  if (!status.ok()) co_return status;
  const std::string proof = Proof(secret, "called", opening, self, reply.challenge);
  std::memcpy(reply.proof.data(), proof.data(), proof.size());
  std::string theirs(core::kHashBytes, '\0');
  status = co_await WriteAll(socket, BytesOf(reply));
  if (status.ok()) status = co_await ReadAll(socket, theirs.data(), theirs.size());
  if (!status.ok()) co_return status;
  if (!core::IsSame(theirs, Proof(secret, "caller", opening, self, reply.challenge))) {
    co_return Stranger("it does not know this job's secret (SIRTAKI_SECRET)");
  }
  *caller = {static_cast<Purpose>(opening.purpose), opening.rank, opening.size};
  const std::string why_not = judge(*caller).substr(0, kLongestReason);
  const auto length = static_cast<std::uint16_t>(why_not.size());
  status = co_await WriteAll(socket, BytesOf(length) + why_not);
  if (!status.ok() || why_not.empty()) co_return status;
  co_return Status(StatusCode::kInvalidArgument, why_not);
}

}  // namespace sirtaki::tcp
