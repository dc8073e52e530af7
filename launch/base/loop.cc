// One thread has the loop; the thread sanitizer knows no fences.
#define BOOST_ASIO_DISABLE_FENCED_BLOCK

#include "launch/base/loop.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/signal_set.hpp>
#include <csignal>
#include <utility>

#include "launch/base/shell_text.h"

namespace sirtaki::launch {

namespace asio = boost::asio;
using asio::ip::tcp;
using core::Status;
using core::StatusCode;
using Error = boost::system::error_code;

namespace {

constexpr int kMostAtOnce = 64;  // before what waits for time has its turn

void DoNothing(int /*signal*/) {}

bool AsksForAnEnd(int signal) { return signal == SIGINT || signal == SIGTERM || signal == SIGHUP; }

// The programs that this process starts do not have the connection.
void Prepare(int fd) {
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  const auto set = [fd](int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof(value));
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 4);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 2);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 12'000);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
}

}  // namespace

struct Loop::Impl {
  void WaitForSignal() {
    signals.async_wait([this](const Error& error, int signal) {
      if (error) return;
      told = told || AsksForAnEnd(signal);
      take_signal(signal);
      WaitForSignal();
    });
  }

  asio::io_context io{1};
  asio::executor_work_guard<asio::io_context::executor_type> work{io.get_executor()};
  asio::signal_set signals{io};
  std::function<void(int)> take_signal;
  bool told = false;  // to end, by a signal
  tcp::acceptor acceptor{io};
  std::function<void(std::optional<Link>)> take_link;
};

Loop::Loop() : impl_(std::make_unique<Impl>()) {}

Loop::~Loop() {
  // Signals that come from here on wait until they have their old meaning.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  int late = 0;
  impl_->take_signal = [&late, told = impl_->told](int signal) {
    if (!told && AsksForAnEnd(signal)) late = signal;
  };
  impl_->acceptor.close();
  impl_->io.poll();  // what waited in the loop is closed, and not called any more
  impl_.reset();
  for (const int signal : {SIGUSR1, SIGUSR2}) std::signal(signal, &DoNothing);
  if (late != 0) std::raise(late);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Loop::Run(core::TimePoint until) {
  if (until == core::TimePoint::max()) {
    impl_->io.run_one();  // the other one looks every second whether it is time
  } else {
    impl_->io.run_one_until(until);
  }
  for (int i = 0; i < kMostAtOnce && impl_->io.poll_one() > 0; ++i) continue;
}

void Loop::TakeSignals(UserSignals users, std::function<void(int)> take) {
  impl_->take_signal = std::move(take);
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) impl_->signals.add(signal);
  struct sigaction before {};
  sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) impl_->signals.add(SIGHUP);  // nohup ignores it
  for (const int signal : {SIGUSR1, SIGUSR2}) {
    if (users == UserSignals::kTaken) impl_->signals.add(signal);
    if (users == UserSignals::kIgnored) std::signal(signal, &DoNothing);
  }
  std::signal(SIGPIPE, SIG_IGN);
  impl_->WaitForSignal();
}

struct Source::Impl {
  asio::posix::stream_descriptor fd;
  std::function<void()> then;
  bool asked = false;
};

Source::Source(Loop* loop, std::function<void()> then)
    : impl_(new Impl{asio::posix::stream_descriptor(loop->impl_->io), std::move(then)}) {}

Source::~Source() = default;

void Source::Open(Descriptor fd) {
  impl_->fd.assign(fd.Release());
  impl_->fd.native_non_blocking(true);
}

void Source::Close() {
  impl_->fd.close();
  impl_->asked = false;
}

bool Source::is_open() const { return impl_->fd.is_open(); }

int Source::fd() const { return impl_->fd.native_handle(); }

void Source::Ask() {
  if (impl_->asked || !is_open()) return;
  impl_->asked = true;
  impl_->fd.async_wait(asio::posix::stream_descriptor::wait_read, [this](const Error& error) {
    if (error) return;  // it is closed, and may be gone
    impl_->asked = false;
    impl_->then();
  });
}

struct Link::Impl : std::enable_shared_from_this<Impl> {
  explicit Impl(tcp::socket made) : socket(std::move(made)) {}

  void Read() {
    socket.async_wait(tcp::socket::wait_read, [self = shared_from_this()](const Error& error) {
      if (!error && self->socket.is_open()) self->TakeMessages();
    });
  }

  void TakeMessages() {
    std::string bytes;
    const Transfer transfer = ReadSome(socket.native_handle(), &bytes);
    reader.Append(bytes);
    std::optional<RankMessage> message;
    Status status;
    while ((status = reader.Next(&message)).ok() && message) {
      if (!take(*message)) return Finish({});
      if (!socket.is_open()) return;
    }
    if (!status.ok() || transfer.ended) return Finish(status.ok() ? transfer.why : status);
    Read();
  }

  void Finish(const Status& why) {
    socket.close();
    end(why);
  }

  void Write() {
    // Reading tells as well what an error here means.
    const Transfer transfer = WriteSome(socket.native_handle(), outbox);
    outbox.erase(0, transfer.ended ? outbox.size() : transfer.bytes);
    if (outbox.empty() || writing) return;
    writing = true;
    socket.async_wait(tcp::socket::wait_write, [self = shared_from_this()](const Error& error) {
      self->writing = false;
      if (!error && self->socket.is_open()) self->Write();
    });
  }

  tcp::socket socket;
  MessageReader reader{kMaxGreeting};
  Take take;
  End end;
  std::string outbox;
  bool writing = false;
};

Link& Link::operator=(Link&& other) noexcept {
  Close();
  impl_ = std::move(other.impl_);
  return *this;
}

Link::~Link() { Close(); }

void Link::Connect(Loop* loop, std::string_view address, std::function<void(const Status&)> then) {
  Close();
  const std::size_t colon = std::min(address.find(':'), address.size());
  const std::string_view port_text = address.substr(std::min(colon + 1, address.size()));
  const auto port = NumberFrom<unsigned short>(port_text, 1, 65535);
  Error error;
  const auto host = asio::ip::make_address_v4(std::string(address.substr(0, colon)), error);
  if (error || !port) return then({StatusCode::kInvalidArgument, "is not an address"});
  tcp::socket socket(loop->impl_->io);
  socket.open(tcp::v4(), error);
  if (error) return then({StatusCode::kBackend, error.message()});
  Prepare(socket.native_handle());
  impl_ = std::make_shared<Impl>(std::move(socket));
  const auto done = [impl = impl_, then = std::move(then)](const Error& why) {
    if (!impl->socket.is_open()) return;
    if (why) impl->socket.close();
    then(why ? Status(StatusCode::kBackend, why.message()) : Status::Ok());
  };
  impl_->socket.async_connect({host, *port}, done);
}

void Link::Close() {
  if (is_open()) impl_->socket.close();
}

bool Link::is_open() const { return impl_ != nullptr && impl_->socket.is_open(); }

void Link::Hear(Take take, End end) {
  const bool first = impl_->take == nullptr;
  impl_->take = std::move(take);
  impl_->end = std::move(end);
  if (first) impl_->Read();
}

void Link::Trust() { impl_->reader.Allow(kMaxMessage); }

void Link::Send(std::string_view frame) {
  if (!is_open()) return;
  impl_->outbox += frame;
  impl_->Write();
}

bool Link::has_sent_all() const { return impl_->outbox.empty(); }

void Link::EndSending() {
  Error error;
  impl_->socket.shutdown(tcp::socket::shutdown_send, error);
}

std::string Link::own_end() const {
  Error error;
  const tcp::endpoint end = impl_->socket.local_endpoint(error);
  return error ? "" : end.address().to_string() + ":" + std::to_string(end.port());
}

std::string Link::other_address() const {
  Error error;
  const tcp::endpoint end = impl_->socket.remote_endpoint(error);
  return error ? "" : end.address().to_string();
}

Status Loop::Listen(bool local, std::function<void(std::optional<Link>)> take, int* port) try {
  impl_->take_link = std::move(take);
  tcp::acceptor& acceptor = impl_->acceptor;
  acceptor.open(tcp::v4());
  fcntl(acceptor.native_handle(), F_SETFD, FD_CLOEXEC);
  acceptor.bind({local ? asio::ip::address_v4::loopback() : asio::ip::address_v4::any(), 0});
  acceptor.listen();
  Accept();
  *port = acceptor.local_endpoint().port();
  return Status::Ok();
} catch (const boost::system::system_error& error) {
  return {StatusCode::kBackend, error.code().message()};
}

void Loop::Accept() {
  impl_->acceptor.async_accept([this](const Error& error, tcp::socket socket) {
    // One that had come before the acceptor was closed still comes here.
    if (error == asio::error::operation_aborted || !impl_->acceptor.is_open()) return;
    if (error) return impl_->take_link(std::nullopt);
    Prepare(socket.native_handle());
    socket.native_non_blocking(true);
    impl_->take_link(Link(std::make_shared<Link::Impl>(std::move(socket))));
    Accept();
  });
}

int FreePort() {
  asio::io_context io;
  tcp::acceptor acceptor(io);
  Error error;
  acceptor.open(tcp::v4(), error);
  acceptor.bind({tcp::v4(), 0}, error);
  return acceptor.local_endpoint(error).port();
}

}  // namespace sirtaki::launch
