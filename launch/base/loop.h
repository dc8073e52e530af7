// The loop waits, in one thread, for all that sirtakirun waits for: signals, pipes, and the TCP connections to its ranks.
// Boost.Asio does the waiting, and loop.cc alone includes it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/status.h"
#include "core/base/types.h"
#include "launch/base/descriptor.h"
#include "launch/base/rank_messages.h"

namespace sirtaki::launch {

class Link;

// The loop outlives what waits in it.
class Loop {
 public:
  Loop();
  // Signals that were taken end this process again, as does one that came too late to be taken, unless an earlier one was.
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Waits until something is ready, and calls what waits for it; no longer than `until`.
  void Run(core::TimePoint until);

  enum class UserSignals : std::uint8_t { kIgnored, kTaken };
  // Takes SIGINT, SIGTERM, SIGCHLD, and SIGHUP unless it is ignored. SIGUSR1 and SIGUSR2 are taken too, or do nothing (where
  // the program gets them as well). A closed pipe is no signal.
  void TakeSignals(UserSignals users, std::function<void(int)> take);

  // Listens on a free port, of the loopback alone if `local`, and hands over connections as they come. No link: it cannot be
  // had now, as where this process or the system has no room for it, and it and later ones wait until Accept is called.
  // kBackend: it cannot listen.
  core::Status Listen(bool local, std::function<void(std::optional<Link>)> take, int* port);
  void Accept();

 private:
  friend class Source;
  friend class Link;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A source is a descriptor that no other process has, so that it can be made not to block.
class Source {
 public:
  Source(Loop* loop, std::function<void()> then);
  ~Source();
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  void Open(Descriptor fd);
  void Close();
  bool is_open() const;
  int fd() const;
  // Calls `then` once, when it can be read; nothing if it was asked already, or is closed.
  void Ask();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A link is one end of a connection between sirtakirun and a rank. Children do not have it. A host that is gone, or a network that is
// down, is noticed within about 12 s.
class Link {
 public:
  using Take = std::function<bool(const RankMessage&)>;  // false: the other end is not one of ours
  // Tells why the link was closed: by the other end (Ok), because that host does not answer (kTimedOut), because the other end
  // said what it must not say (kProtocol), or for another reason (kBackend). Nothing is told after Close.
  using End = std::function<void(const core::Status& why)>;

  Link() = default;
  Link(Link&& other) noexcept = default;
  Link& operator=(Link&& other) noexcept;
  ~Link();

  // Connects with "address:port", and calls `then` when it has or cannot: kInvalidArgument, kBackend.
  void Connect(Loop* loop, std::string_view address, std::function<void(const core::Status&)> then);
  void Close();
  bool is_open() const;
  // Hands on the messages that come from now on.
  void Hear(Take take, End end);
  // The other end has proven itself: its messages may have kMaxMessage bytes instead of kMaxGreeting.
  void Trust();
  void Send(std::string_view frame);
  bool has_sent_all() const;
  void EndSending();
  // own_end() is this end's address and port, "10.0.0.1:4711", other_address() the other's without the port; empty if they
  // are not known.
  std::string own_end() const;
  std::string other_address() const;

 private:
  friend class Loop;
  struct Impl;
  explicit Link(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  std::shared_ptr<Impl> impl_;
};

// Returns a port that is free now on this machine.
int FreePort();

}  // namespace sirtaki::launch
