#include "launch/base/signal_pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string>
#include <utility>

#include "launch/base/sockets.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

int signal_reader = -1;
int signal_writer = -1;

void Note(int signal) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(signal);
  const ssize_t put = write(signal_writer, &byte, 1);
  static_cast<void>(put);  // a full pipe has enough of them
  errno = saved;
}

void DoNothing(int /*signal*/) {}

}  // namespace

Status SignalPipe::Open(User user) {
  if (signal_reader >= 0) return Status::Ok();
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
    return {StatusCode::kBackend, std::string("pipe: ") + std::strerror(errno)};
  }
  signal_reader = ends[0];
  signal_writer = ends[1];
  struct sigaction action {};
  action.sa_handler = &Note;
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) sigaction(signal, &action, nullptr);
  struct sigaction before {};
  sigaction(SIGHUP, nullptr, &before);
  const bool stays = before.sa_handler == SIG_IGN;  // as nohup has it
  if (!stays) sigaction(SIGHUP, &action, nullptr);
  action.sa_handler = user == User::kTaken ? &Note : &DoNothing;
  for (const int signal : {SIGUSR1, SIGUSR2}) sigaction(signal, &action, nullptr);
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
  return Status::Ok();
}

int SignalPipe::fd() { return signal_reader; }

std::vector<int> SignalPipe::Take() {
  std::string bytes;
  ReadSome(signal_reader, &bytes);
  return {bytes.begin(), bytes.end()};
}

void SignalPipe::Close() {
  if (signal_reader < 0) return;
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD, SIGHUP}) {
    struct sigaction now {};
    sigaction(signal, nullptr, &now);
    if (now.sa_handler == &Note) sigaction(signal, &action, nullptr);
  }
  action.sa_handler = &DoNothing;
  for (const int signal : {SIGUSR1, SIGUSR2}) sigaction(signal, &action, nullptr);
  const std::vector<int> signals = Take();
  close(std::exchange(signal_reader, -1));
  close(std::exchange(signal_writer, -1));
  for (const int signal : signals) {
    if (signal != SIGCHLD) raise(signal);
  }
}

}  // namespace sirtaki::launch
