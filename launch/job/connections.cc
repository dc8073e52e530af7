#include "launch/job/connections.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace sirtaki::launch {

using core::Status;
using core::TimePoint;

namespace {

// The time for a connection to say who it is: a rank does so at once.
constexpr auto kHelloAfter = std::chrono::seconds(10);
// The pause after a connection that there was no room for.
constexpr auto kAcceptAgain = std::chrono::seconds(1);
constexpr int kMostAccepted = 64;  // before something else has its turn

bool IsGreeter(const std::unique_ptr<Connection>& connection) {
  return !connection->keeper.knows() && connection->fd.valid();
}

}  // namespace

Status Connections::Open(bool local, std::string key, int* port) {
  key_ = std::move(key);
  return Listen(local, &listener_, port);
}

void Connections::AcceptAll(TimePoint now) {
  for (int i = 0; i < kMostAccepted; ++i) {
    bool no_room = false;
    Descriptor fd = Accept(listener_, &no_room);
    if (no_room && CloseOldestGreeter()) continue;
    // It would be ready all the time.
    if (no_room) accept_at_ = now + kAcceptAgain;
    if (!fd.valid()) return;
    all_.push_back(std::make_unique<Connection>(std::move(fd), key_, now + kHelloAfter));
    if (Greeters() > most_greeters_) CloseOldestGreeter();
  }
}

void Connections::CheckTimes(TimePoint now) {
  for (const auto& connection : all_) {
    if (connection->rank < 0 && now >= connection->silent_by) connection->fd.Close();
  }
  if (accept_at_ && now >= *accept_at_) accept_at_.reset();
}

std::optional<TimePoint> Connections::NextTime() const {
  std::optional<TimePoint> next = accept_at_;
  for (const auto& connection : all_) {
    const TimePoint time = connection->silent_by;
    if (connection->rank < 0 && (!next || time < *next)) next = time;
  }
  return next;
}

void Connections::RemoveClosed() {
  std::erase_if(all_, [](const auto& connection) { return !connection->fd.valid(); });
}

std::size_t Connections::Greeters() const {
  return static_cast<std::size_t>(std::count_if(all_.begin(), all_.end(), IsGreeter));
}

bool Connections::CloseOldestGreeter() {
  const auto oldest = std::find_if(all_.begin(), all_.end(), IsGreeter);
  if (oldest == all_.end()) return false;
  (*oldest)->fd.Close();
  return true;
}

}  // namespace sirtaki::launch
