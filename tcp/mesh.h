// A mesh is the connections of each rank with each other one. A rank calls the lower ranks, and the
// higher ones call it.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"
#include "tcp/door.h"
#include "tcp/line.h"
#include "tcp/place.h"

namespace sirtaki::tcp {

// How long a rank waits before it tries again what has failed.
inline constexpr auto kTryAgain = std::chrono::milliseconds(50);
// All ranks listen before anybody calls. So what the system has refused for this long is not going to
// be better: the wait is for a host that looks for the way to another.
inline constexpr auto kRefusedForGood = std::chrono::seconds(5);

// How ranks are called in texts.
std::string NumbersText(const std::vector<int>& ranks);
std::string NameOf(int rank, const std::vector<std::string>& hosts);

class Mesh {
 public:
  // `secret`: of these connections. `hosts`: their names, by rank, for texts. The door is open.
  Mesh(Tasks& tasks, Door& door, const Place& place, const std::vector<std::string>& hosts,
       std::string secret, core::TimePoint deadline);

  // Calls that are still under way when it returns refer to the mesh, which has to live as long as
  // the tasks run. `ends`: where each rank listens. Call it once. Errors:
  //   kBackend   a rank that is missing cannot be called: the text names both ends
  //   kProtocol, kInvalidArgument  those of Greet
  //   kTimedOut  others have not called this rank: it does not know why
  //   kAborted   Stop was called
  core::Status Connect(const std::vector<asio::ip::tcp::endpoint>& ends);
  // Others have failed.
  void Stop() { is_stopped_ = true; }
  // The connections by rank, once.
  std::vector<Lines> Release();

 private:
  static constexpr std::size_t kLines = 3;

  asio::awaitable<core::Status> CallOnce(Socket socket, int rank, Purpose purpose,
                                         asio::ip::tcp::endpoint end);
  asio::awaitable<void> Call(int rank, Purpose purpose, asio::ip::tcp::endpoint end);
  Socket* SeatOf(const Caller& caller);
  core::Status WhyIncomplete() const;

  Tasks& tasks_;
  Door& door_;
  const int rank_;
  const int size_;
  const std::vector<std::string> hosts_;
  const std::string secret_;
  const core::TimePoint deadline_;
  std::vector<std::array<Socket, kLines>> sockets_;  // by rank
  int left_ = 0;                                     // connections to be made
  bool is_stopped_ = false;
  core::Status failure_;
  std::string why_;    // why the last call that failed did so
  int why_rank_ = -1;  // the rank that this is about; it may have been reached since
};

}  // namespace sirtaki::tcp
