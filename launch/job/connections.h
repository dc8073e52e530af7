// The connections of a run to its ranks, and those that have not proven that they are ranks', which
// are few and do not stay: strangers cannot keep ranks out.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"
#include "launch/base/greeting.h"
#include "launch/base/loop.h"
#include "launch/base/rank_messages.h"
#include "launch/plan/plan.h"

namespace sirtaki::launch {

struct Connection {
  Connection(Link accepted, const std::string& key, core::TimePoint until)
      : link(std::move(accepted)), keeper(key, link.own_end()), silent_by(until) {}

  Link link;
  Doorkeeper keeper;
  int rank = -1;              // until it has said which it is
  core::TimePoint silent_by;  // then: it is no rank of ours
};

class Connections {
 public:
  // A message of one that has proven itself. False: it is not from a rank of ours.
  using Take = std::function<bool(Connection*, const RankMessage&)>;
  using End = std::function<void(Connection*, const core::Status& why)>;  // what a Link tells

  // The connections that have proven nothing are at most `most_greeters` at once.
  Connections(Loop* loop, std::size_t most_greeters, Take take, End end)
      : loop_(loop), most_greeters_(most_greeters), take_(std::move(take)), end_(std::move(end)) {}

  // Listens, on the loopback alone if `local`, for those that know the key. Where there are too
  // many, or there is no room, the oldest of those that have proven nothing is closed.
  core::Status Open(bool local, std::string key, int* port);
  // Opens for the ranks of the plan, and adds the variables that tell them where and with which key.
  // `alone`: all of them are on this machine. Errors: kInvalidArgument where other hosts cannot reach it.
  core::Status OpenFor(const Plan& plan, bool alone,
                       std::vector<std::pair<std::string, std::string>>* variables);
  // Closes those that have not said in time which rank they are, and forgets what is closed.
  void CheckTimes(core::TimePoint now);
  // The next time that changes something; max: none.
  core::TimePoint NextTime() const;
  // The connections are in the order in which they came; closed ones stay until times are checked.
  const std::vector<std::unique_ptr<Connection>>& all() const { return all_; }

 private:
  void MakeRoom();
  void Add(Link link);
  bool Hear(Connection* connection, const RankMessage& message);
  bool CloseOldestGreeter();  // false if there is none

  Loop* const loop_;
  const std::size_t most_greeters_;
  const Take take_;
  const End end_;
  std::string key_;
  core::TimePoint accept_at_ = core::TimePoint::max();  // again
  std::vector<std::unique_ptr<Connection>> all_;
};

}  // namespace sirtaki::launch
