#include "launch/job/connections.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "launch/base/shell_text.h"
#include "launch/plan/routes.h"

namespace sirtaki::launch {

using core::Clock;
using core::Status;
using core::StatusCode;
using core::TimePoint;

namespace {

// The time for a connection to say who it is: a rank does so at once.
constexpr auto kHelloAfter = std::chrono::seconds(10);
// The pause after a connection that there was no room for: it would be ready all the time.
constexpr auto kAcceptAgain = std::chrono::seconds(1);

bool IsGreeter(const std::unique_ptr<Connection>& connection) {
  return !connection->keeper.knows() && connection->link.is_open();
}

}  // namespace

Status Connections::Open(bool local, std::string key, int* port) {
  key_ = std::move(key);
  const auto take = [this](std::optional<Link> link) { link ? Add(*std::move(link)) : MakeRoom(); };
  return loop_->Listen(local, take, port);
}

Status Connections::OpenFor(const Plan& plan, bool alone,
                            std::vector<std::pair<std::string, std::string>>* variables) {
  int port = 0;
  const std::string key = RandomKey();
  if (key.empty()) return {StatusCode::kBackend, "the system gives no random numbers"};
  Status status = Open(alone, key, &port);
  if (!status.ok()) return status;
  std::vector<std::string> addresses = {"127.0.0.1"};
  if (!alone) addresses = OwnAddresses(plan.interfaces);
  if (addresses.empty()) {
    return {StatusCode::kInvalidArgument,
            plan.interfaces.empty()
                ? "this machine has no network interface that other hosts could reach"
                : "--network-interfaces: this machine has no address on " +
                      Joined(plan.interfaces, ",")};
  }
  for (std::string& address : addresses) address += ":" + std::to_string(port);
  variables->emplace_back(kAddressVariable, Joined(addresses, ","));
  variables->emplace_back(kKeyVariable, key);
  return Status::Ok();
}

void Connections::MakeRoom() {
  if (CloseOldestGreeter()) return loop_->Accept();
  accept_at_ = Clock::now() + kAcceptAgain;
}

void Connections::Add(Link link) {
  all_.push_back(std::make_unique<Connection>(std::move(link), key_, Clock::now() + kHelloAfter));
  Connection* const added = all_.back().get();
  added->link.Hear([this, added](const RankMessage& message) { return Hear(added, message); },
                   [this, added](const Status& why) { end_(added, why); });
  const auto greeters = std::count_if(all_.begin(), all_.end(), IsGreeter);
  if (static_cast<std::size_t>(greeters) > most_greeters_) CloseOldestGreeter();
}

bool Connections::Hear(Connection* connection, const RankMessage& message) {
  if (connection->keeper.knows()) return take_(connection, message);
  std::string reply;
  if (!connection->keeper.Take(message, &reply)) return false;
  if (connection->keeper.knows()) connection->link.Trust();
  connection->link.Send(reply);
  return true;
}

void Connections::CheckTimes(TimePoint now) {
  std::erase_if(all_, [now](const auto& connection) {
    return !connection->link.is_open() || (connection->rank < 0 && now >= connection->silent_by);
  });
  if (now < accept_at_) return;
  accept_at_ = TimePoint::max();
  loop_->Accept();
}

TimePoint Connections::NextTime() const {
  TimePoint next = accept_at_;
  for (const auto& connection : all_) {
    if (connection->rank < 0) next = std::min(next, connection->silent_by);
  }
  return next;
}

bool Connections::CloseOldestGreeter() {
  const auto oldest = std::find_if(all_.begin(), all_.end(), IsGreeter);
  if (oldest == all_.end()) return false;
  (*oldest)->link.Close();
  return true;
}

}  // namespace sirtaki::launch
