#include "tcp/lookup.h"

#include <netdb.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>

#include "core/threads/quiet_thread.h"
#include "tcp/door.h"

namespace sirtaki::tcp {

using asio::ip::tcp;
using core::Status;
using core::StatusCode;

namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(2);

struct Addresses {
  int error = 0;
  std::vector<tcp::endpoint> ends;
  std::atomic<bool> is_there{false};
};

void Ask(const std::string& name, int port, Addresses* found) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  found->error = getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &first);
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> all(found->error == 0 ? first : nullptr,
                                                               &freeaddrinfo);
  for (const addrinfo* one = all.get(); one != nullptr; one = one->ai_next) {
    tcp::endpoint end;
    if (one->ai_addrlen > end.capacity()) continue;
    std::memcpy(end.data(), one->ai_addr, one->ai_addrlen);
    end.resize(one->ai_addrlen);
    found->ends.push_back(end);
  }
  found->is_there = true;
}

}  // namespace

asio::awaitable<Status> LookUp(std::string name, int port, std::vector<tcp::endpoint>* ends) {
  const auto found = std::make_shared<Addresses>();
  core::StartQuietThread([name = std::move(name), port, found] {
    Ask(name, port, found.get());
  }).detach();
  while (!found->is_there) co_await Sleep(kLookAgain);
  if (found->error != 0) {
    co_return Status(StatusCode::kInvalidArgument, gai_strerror(found->error));
  }
  *ends = std::move(found->ends);
  co_return Status::Ok();
}

}  // namespace sirtaki::tcp
