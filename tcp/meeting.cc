#include "tcp/meeting.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <utility>

#include "core/base/hmac.h"
#include "core/base/text.h"
#include "tcp/door.h"
#include "tcp/frame.h"
#include "tcp/lookup.h"
#include "tcp/loss.h"
#include "tcp/mesh.h"

namespace sirtaki::tcp {

using asio::ip::tcp;
using core::Clock;
using core::Status;
using core::StatusCode;
using core::TimePoint;
using Error = boost::system::error_code;

namespace {

constexpr auto kConnectTime = std::chrono::seconds(2);  // the address may be one that is old
constexpr std::size_t kCallsOfARank = 3;                // to each other
constexpr std::size_t kTokenBytes = 16;
// Each rank asks for rank 0's name, and there is one name server for all.
constexpr auto kAskNamesAgain = std::chrono::milliseconds(500);

constexpr const char* kNotReached =
    "; rank 0 has to run there, MASTER_ADDR and the port to be its own, and no firewall between";
constexpr const char* kOtherSecret = "; give all ranks the same, or this job another port";

// A host that is gone without a word is noticed within about 10 s: its rank is started elsewhere.
void NoticeSilence(const Socket& socket) {
  constexpr std::array<std::array<int, 3>, 4> kOptions = {{{SOL_SOCKET, SO_KEEPALIVE, 1},
                                                           {IPPROTO_TCP, TCP_KEEPIDLE, 4},
                                                           {IPPROTO_TCP, TCP_KEEPINTVL, 2},
                                                           {IPPROTO_TCP, TCP_KEEPCNT, 3}}};
  for (const auto& [level, name, value] : kOptions) {
    setsockopt(socket->native_handle(), level, name, &value, sizeof(value));
  }
}

// A rank has a few connections with each other one, rank 0 one more for the meeting, and the program its
// own files.
Status AllowFiles(std::size_t connections) {
  constexpr rlim_t kOthers = 256;
  const rlim_t needed = connections + kOthers;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return Status::Ok();
  limit.rlim_cur = std::min(needed, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= needed) return Status::Ok();
  return {StatusCode::kBackend, "a rank of this job needs " + std::to_string(needed) +
                                    " open files, and may have " + std::to_string(limit.rlim_max) +
                                    ": ulimit -Hn " + std::to_string(needed) +
                                    ", or LimitNOFILE, nofile in limits.conf"};
}

}  // namespace

struct Meeting::Impl {
  Impl(Place where, MeetingTerms given)
      : place(std::move(where)),
        terms(std::move(given)),
        tasks(terms.why_over),
        door(tasks, place.rank, kCallsOfARank * static_cast<std::size_t>(place.size)) {
    peers.resize(static_cast<std::size_t>(place.rank == 0 ? place.size : 1));
  }

  // ---- the meeting ----

  // A process that has ended since, and was started again, is welcome.
  bool IsTaken(Socket* seat) {
    if (!*seat) return false;
    if (!HasHungUp(*seat)) return true;
    seat->reset();
    --have_met;
    return false;
  }

  bool HaveAllMet() {
    return have_met == place.size && std::all_of(peers.begin() + 1, peers.end(),
                                                 [this](Socket& seat) { return IsTaken(&seat); });
  }

  std::string Judge(const Caller& caller) {
    const std::string who = "rank " + std::to_string(caller.rank);
    std::string why;
    if (caller.purpose != Purpose::kMeeting) {
      why = who + " wants something else than to meet";
    } else if (caller.size != place.size) {
      why = who + " is one of " + std::to_string(caller.size) + ", rank 0 one of " +
            std::to_string(place.size) + ": WORLD_SIZE has to be the same everywhere";
    } else if (caller.rank < 1 || caller.rank >= place.size) {
      why = "a process that wants to meet rank 0 says that it is " + who;
    } else if (IsTaken(&peers[static_cast<std::size_t>(caller.rank)])) {
      why = "two processes say that they are " + who + ": RANK has to differ";
    }
    return why;
  }

  Status Host(TimePoint deadline) {
    const Status listens = door.Open(place.address, place.port);
    if (!listens.ok()) {
      return {
          listens.code(),
          "rank 0 cannot listen at port " + std::to_string(place.port) +
              " for the other ranks: " + listens.message() +
              "; SIRTAKI_PORT, the same on all ranks, chooses another (else it is MASTER_PORT)"};
    }
    if (place.port == 0) {
      place.port = door.port();
      terms.listens(place.port);
    }
    door.Receive({place.secret, deadline, [this](const Caller& caller) { return Judge(caller); },
                  [this](const Caller& caller, Socket socket) {
                    // Another process may have come as the same rank during the greetings.
                    const std::string why = Judge(caller);
                    if (!why.empty()) {
                      peers.push_back(std::move(socket));  // It is told why, too.
                      return tasks.Fail({StatusCode::kMismatch, why});
                    }
                    NoticeSilence(socket);
                    peers[static_cast<std::size_t>(caller.rank)] = std::move(socket);
                    ++have_met;
                  },
                  [this](const std::string& why) {
                    tasks.Fail({StatusCode::kMismatch, why});
                  }});
    tasks.Drive(deadline, [this] { return HaveAllMet(); });
    door.Close();
    if (!tasks.failure().ok()) return tasks.failure();
    if (have_met == place.size) {
      Tell(FrameOf(FrameKind::kText, ""));
      return Status::Ok();
    }
    std::vector<int> missing;
    for (int rank = 1; rank < place.size; ++rank) {
      if (!IsTaken(&peers[static_cast<std::size_t>(rank)])) missing.push_back(rank);
    }
    return {StatusCode::kTimedOut,
            NumbersText(missing) + " did not come to rank 0 (" + place.address + ":" +
                std::to_string(place.port) + ") within start_timeout" + door.StrangersText(),
            {missing.front(), {}, {}}};
  }

  asio::awaitable<void> Reach(TimePoint deadline) {
    const std::string unknown =
        "MASTER_ADDR=" + core::Quoted(place.address) + " does not resolve: ";
    // An attempt that has no answer yet is going to say this.
    last = unknown + "the name server does not answer";
    bool has_called = false;
    core::Duration pause = kTryAgain;
    for (;; co_await Sleep(pause)) {
      std::vector<tcp::endpoint> ends;
      if (const Status found = co_await LookUp(place.address, place.port, &ends); !found.ok()) {
        last = unknown + found.message() +
               "; give rank 0's address, or a name that this host knows (DNS, /etc/hosts)";
        pause = std::min<core::Duration>(2 * pause, kAskNamesAgain);
        continue;
      }
      pause = kTryAgain;
      for (const tcp::endpoint& end : ends) {
        if (!std::exchange(has_called, true)) last = TextOf(end) + ": no answer" + kNotReached;
        const auto socket = std::make_shared<tcp::socket>(tasks.io());
        Status status = co_await ConnectTo(socket, end, deadline);
        if (status.ok()) {
          // Until all have met, rank 0 may be started again, too.
          last = TextOf(end) + ": rank 0 is there, and other ranks are not";
          std::string nothing;
          status = co_await ReadFrame(socket, &nothing);
        }
        if (status.ok()) {
          peers[0] = socket;
          co_return;
        }
        if (status.code() == StatusCode::kAborted) co_return tasks.Fail(status);
        last = TextOf(end) + ": " + status.message();
        if (status.code() == StatusCode::kPeerLost) {
          last += kNotReached;
          continue;
        }
        if (status.code() == StatusCode::kProtocol) last += kOtherSecret;
        const bool is_known = status.code() == StatusCode::kInvalidArgument;
        co_return tasks.Fail(
            {is_known ? StatusCode::kMismatch : status.code(),
             "rank " + std::to_string(place.rank) + " was refused by what listens at " + last});
      }
    }
  }

  asio::awaitable<Status> ConnectTo(Socket socket, tcp::endpoint end, TimePoint deadline) {
    Error error;
    {
      const Watch watch(socket, std::min<TimePoint>(deadline, Clock::now() + kConnectTime));
      co_await socket->async_connect(end, asio::redirect_error(asio::use_awaitable, error));
      if (error) co_return watch.Judge({StatusCode::kPeerLost, error.message()});
    }
    Prepare(socket);
    NoticeSilence(socket);
    // Another one may be silent for ever.
    const TimePoint by = std::min<TimePoint>(deadline, Clock::now() + kGreetingTime);
    co_return co_await Greet(socket, place.secret, {Purpose::kMeeting, place.rank, place.size}, 0,
                             by);
  }

  Status Visit(TimePoint deadline) {
    tasks.Spawn(Reach(deadline));
    tasks.Drive(deadline, [this] { return peers[0] != nullptr; });
    if (!tasks.failure().ok() || peers[0]) return tasks.failure();
    return {StatusCode::kTimedOut,
            "rank " + std::to_string(place.rank) +
                " did not meet the others at rank 0 within start_timeout: " + last,
            {0, {}, {}}};
  }

  // ---- exchanges ----

  // Tells all others. Their connections take it without being read.
  void Tell(const std::string& frame) {
    for (const Socket& peer : peers) {
      Error ignored;
      if (!peer) continue;
      peer->non_blocking(true, ignored);
      peer->write_some(asio::buffer(frame), ignored);
    }
  }
  void TellFailure(const Status& why) { Tell(FrameOf(FrameKind::kFailure, why.message())); }

  // Only rank 0 knows which rank an end of a connection is.
  Status Named(Status status, int rank) const {
    if (status.ok() || status.code() == StatusCode::kAborted) return status;
    return {status.code(),
            "rank " + std::to_string(rank) + " is lost during the start: " + status.message(),
            {rank, {}, {}}};
  }

  asio::awaitable<void> Read(Socket socket, int rank, std::string* text, int* left) {
    Status status = co_await ReadFrame(std::move(socket), text);
    if (!status.ok()) co_return tasks.Fail(Named(std::move(status), rank));
    heard[static_cast<std::size_t>(rank)] = true;
    --*left;
  }
  asio::awaitable<void> Write(Socket socket, int rank, const std::string* frame, int* left) {
    Status status = co_await WriteAll(std::move(socket), *frame);
    // Rank 0 may have said why it goes: who reads learns that.
    if (!status.ok() && rank != 0) co_return tasks.Fail(Named(std::move(status), rank));
    --*left;
  }

  // What is under way refers to `left` and texts of the caller, who destroys the meeting then.
  Status Wait(const int& left, TimePoint deadline) {
    tasks.Drive(deadline, [&left] { return left == 0; });
    if (tasks.failure().ok() && left > 0) {
      tasks.Fail({StatusCode::kTimedOut, SilentText()});
    }
    return tasks.failure();
  }

  // A host that is gone says no good-bye.
  std::string SilentText() const {
    if (place.rank != 0) {
      return "rank 0 did not say within start_timeout what all ranks agree on: it waits for "
             "another rank, or its host is gone";
    }
    std::vector<int> silent;
    for (int rank = 1; rank < place.size; ++rank) {
      if (!heard[static_cast<std::size_t>(rank)]) silent.push_back(rank);
    }
    return NumbersText(silent) +
           " did not answer rank 0 within start_timeout: a process is stopped, or a host or its "
           "link is gone";
  }

  // ---- connections of each with each ----

  // The address book is what rank 0 tells all ranks: a token that makes the secret of these
  // connections, and the address of each rank. Where rank 0 sees a rank at the loopback, that rank is on its host, and others reach
  // it where they reach rank 0.
  std::string AddressBook() const {
    std::string here = "127.0.0.1";
    Error ignored;
    for (const Socket& peer : peers) {
      if (!peer) continue;
      here = Plain(peer->local_endpoint(ignored).address()).to_string();
      if (!Plain(peer->remote_endpoint(ignored).address()).is_loopback()) break;
    }
    std::vector<std::string> told = {core::RandomBytes(kTokenBytes)};
    for (const Socket& peer : peers) {
      const auto there = peer ? Plain(peer->remote_endpoint(ignored).address())
                              : asio::ip::address(asio::ip::address_v4::loopback());
      told.push_back(there.is_loopback() ? here : there.to_string());
    }
    return Packed(told);
  }

  // Ends the connecting where a rank has failed, or is gone. What it says stays there to be read.
  asio::awaitable<void> Heed(Socket socket) {
    Error error;
    co_await socket->async_wait(tcp::socket::wait_read,
                                asio::redirect_error(asio::use_awaitable, error));
    char first = 0;
    const ssize_t came = recv(socket->native_handle(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
    const bool is_nothing = came < 0 && IsForLater(errno);
    if (!is_nothing && first != static_cast<char>(FrameKind::kText)) mesh->Stop();
  }

  // Connects the ranks, who have told where they listen.
  Status MakeLines(const std::vector<std::string>& told, TimePoint deadline,
                   std::vector<Lines>* lines) {
    const auto size = static_cast<std::size_t>(place.size);
    std::vector<std::string> book(1 + size);
    std::vector<tcp::endpoint> ends(size);
    for (std::size_t rank = 0; rank < size; ++rank) {
      std::vector<std::string> said(2);
      Error error;
      if (!Unpack(told[rank], &said) || (rank == 0 && !Unpack(said[1], &book))) {
        return {StatusCode::kProtocol, "rank " + std::to_string(rank) + " told what no rank tells"};
      }
      ends[rank] = {asio::ip::make_address(book[1 + rank], error),
                    static_cast<unsigned short>(std::atoi(said[0].c_str()))};
      if (!error && ends[rank].port() != 0) continue;
      return {StatusCode::kTimedOut, NameOf(static_cast<int>(rank), hosts) + " cannot listen"};
    }
    if (book[0].empty()) return {StatusCode::kBackend, "rank 0's system gives no random numbers"};
    const core::Hash key = core::HmacSha256(place.secret, "lines:" + book[0]);
    // What they say about it to each other needs time, too.
    const TimePoint by = Clock::now() + (deadline - Clock::now()) / 4 * 3;
    mesh =
        std::make_unique<Mesh>(tasks, door, place, hosts, std::string(key.begin(), key.end()), by);
    for (const Socket& peer : peers) {
      if (peer) tasks.Spawn(Heed(peer));
    }
    Status status = mesh->Connect(ends);
    if (status.ok()) *lines = mesh->Release();
    return status;
  }

  Place place;
  const MeetingTerms terms;
  std::vector<std::string> hosts;
  std::string last;  // why rank 0 was not reached yet
  Tasks tasks;
  Door door;
  std::unique_ptr<Mesh> mesh;
  int have_met = 1;           // ranks
  std::vector<bool> heard;    // in the exchange that is under way, by rank
  std::vector<Socket> peers;  // of rank 0: by rank; of others: rank 0 alone
};

Meeting::Meeting(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Meeting::~Meeting() = default;

Status Meeting::Begin(const Place& place, TimePoint deadline, std::unique_ptr<Meeting>* meeting,
                      MeetingTerms terms) {
  auto impl = std::make_unique<Impl>(place, std::move(terms));
  const std::size_t of_each = kCallsOfARank + (place.rank == 0 ? 1 : 0);
  Status status = AllowFiles(of_each * static_cast<std::size_t>(place.size));
  if (!status.ok()) return status;
  if (place.size > 1) status = place.rank == 0 ? impl->Host(deadline) : impl->Visit(deadline);
  if (!status.ok()) {
    if (place.rank == 0) impl->TellFailure(status);
    return status;
  }
  meeting->reset(new Meeting(std::move(impl)));
  return Status::Ok();
}

Status Meeting::Exchange(const std::string& mine, TimePoint deadline,
                         std::vector<std::string>* all) {
  Impl& impl = *impl_;
  if (!impl.tasks.failure().ok()) return impl.tasks.failure();
  all->assign(static_cast<std::size_t>(impl.place.size), {});
  all->at(static_cast<std::size_t>(impl.place.rank)) = mine;
  if (impl.place.size == 1) return Status::Ok();
  impl.heard.assign(all->size(), false);
  if (impl.place.rank == 0) {
    int left = impl.place.size - 1;
    for (int rank = 1; rank < impl.place.size; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      impl.tasks.Spawn(impl.Read(impl.peers[index], rank, &all->at(index), &left));
    }
    Status status = impl.Wait(left, deadline);
    if (!status.ok()) {
      impl.TellFailure(status);
      return status;
    }
    const std::string frame = FrameOf(FrameKind::kText, Packed(*all));
    left = impl.place.size - 1;
    for (int rank = 1; rank < impl.place.size; ++rank) {
      impl.tasks.Spawn(impl.Write(impl.peers[static_cast<std::size_t>(rank)], rank, &frame, &left));
    }
    status = impl.Wait(left, deadline);
    if (!status.ok()) impl.TellFailure(status);
    return status;
  }
  const std::string frame = FrameOf(FrameKind::kText, mine);
  std::string packed;
  int left = 2;
  impl.tasks.Spawn(impl.Write(impl.peers[0], 0, &frame, &left));
  impl.tasks.Spawn(impl.Read(impl.peers[0], 0, &packed, &left));
  Status status = impl.Wait(left, deadline);
  if (status.ok() && !Unpack(packed, all)) {
    impl.tasks.Fail({StatusCode::kProtocol, "rank 0 told what no rank tells"});
  }
  return impl.tasks.failure();
}

Status Meeting::Connect(const std::vector<std::string>& hosts, TimePoint deadline,
                        std::vector<Lines>* lines) {
  Impl& impl = *impl_;
  impl.hosts = hosts;
  const Status opened = impl.door.Open(impl.place.address, 0);
  const int port = opened.ok() ? impl.door.port() : 0;
  const std::string mine = impl.place.rank == 0 ? impl.AddressBook() : "";
  std::vector<std::string> told;
  Status status = Exchange(Packed({std::to_string(port), mine}), deadline, &told);
  if (!status.ok()) return status;
  status = opened.ok() ? impl.MakeLines(told, deadline, lines)
                       : Status(opened.code(), NameOf(impl.place.rank, hosts) +
                                                   " cannot listen: " + opened.message());
  // A rank that has only waited in vain does not know why, and asks the others. One that knows why
  // tells it at once.
  const bool asks = status.code() == StatusCode::kTimedOut || status.code() == StatusCode::kAborted;
  if (!status.ok() && !asks) {
    impl.TellFailure(status);
    impl.tasks.Fail(status);
    return status;
  }
  Status met = Exchange(status.message(), deadline, &told);
  if (!met.ok()) {
    const bool says_more = met.code() == StatusCode::kAborted;
    return status.code() == StatusCode::kTimedOut && !says_more ? status : met;
  }
  for (const std::string& text : told) {
    if (!text.empty()) return {StatusCode::kBackend, text};
  }
  return Status::Ok();
}

}  // namespace sirtaki::tcp
