#include "launch/base/child.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "core/base/text.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

std::optional<rlimit> file_limit;  // before it was raised

using Pipe = std::array<Descriptor, 2>;  // its reader, its writer

bool Open(Pipe* out) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return false;
  *out = {Descriptor(ends[0]), Descriptor(ends[1])};
  return true;
}

// Become runs in the child and does not return. What goes wrong is told through `errors`.
[[noreturn]] void Become(const Command& command, pid_t parent, const Pipe& output,
                         const Pipe& error, int errors) {
  if (!command.outlives) prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // it has died already
  const bool is_none = command.input == Command::kNoInput;
  const int input = is_none ? open("/dev/null", O_RDONLY | O_CLOEXEC) : command.input;
  if (file_limit) setrlimit(RLIMIT_NOFILE, &*file_limit);
  signal(SIGPIPE, SIG_DFL);  // handlers go by themselves, what is ignored does not
  if (command.own_group) setpgid(0, 0);
  if (input != STDIN_FILENO) dup2(input, STDIN_FILENO);
  dup2(output[1].get(), STDOUT_FILENO);
  dup2(error[1].get(), STDERR_FILENO);
  for (const std::string& name : command.unset) unsetenv(name.c_str());
  for (const auto& [name, value] : command.set) setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> words;
  for (const std::string& word : command.words) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  execvp(words[0], words.data());
  const int why = errno;
  const ssize_t put = write(errors, &why, sizeof(why));
  static_cast<void>(put);
  _exit(127);  // nobody sees it: what was written counts
}

}  // namespace

std::size_t RaiseFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  if (file_limit) return limit.rlim_cur;
  file_limit = limit;
  limit.rlim_cur = limit.rlim_max;
  return setrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : file_limit->rlim_cur;
}

std::string CurrentFolder() {
  std::error_code error;
  return std::filesystem::current_path(error).string();
}

Child::Child(Loop* loop, const std::function<bool(Stream)>& take)
    : take_(take),
      output_(loop, [take] { take(Stream::kOutput); }),
      error_(loop, [take] { take(Stream::kError); }) {}

Status Child::Start(const Command& command, int* error) {
  Pipe output;
  Pipe errors;
  Pipe failure;
  const bool open = Open(&output) && Open(&errors) && Open(&failure);
  const pid_t parent = getpid();
  const pid_t pid = open ? fork() : -1;
  if (pid < 0) {
    *error = errno;
    return {StatusCode::kBackend, std::string("fork: ") + std::strerror(errno)};
  }
  if (pid == 0) Become(command, parent, output, errors, failure[1].get());
  failure[1].Close();
  int why = 0;
  ssize_t got = 0;
  while ((got = read(failure[0].get(), &why, sizeof(why))) < 0 && errno == EINTR) continue;
  if (got == static_cast<ssize_t>(sizeof(why))) {
    while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) continue;
    *error = why;
    return {StatusCode::kBackend,
            core::Quoted(command.words[0]) + " cannot be started: " + std::strerror(why)};
  }
  pid_ = pid;
  output_.Open(std::move(output[0]));
  error_.Open(std::move(errors[0]));
  return Status::Ok();
}

std::optional<EndMessage> Child::Ended() {
  int state = 0;
  if (pid_ <= 0 || waitpid(pid_, &state, WNOHANG) != pid_) return std::nullopt;
  pid_ = -1;
  if (WIFSIGNALED(state)) return EndMessage{EndKind::kSignalled, WTERMSIG(state), ""};
  return EndMessage{EndKind::kExited, WEXITSTATUS(state), ""};
}

std::string Child::Read(Stream stream, std::size_t most) {
  Source& from = Of(stream);
  std::string bytes;
  if (from.is_open() && ReadSome(from.fd(), &bytes, most).ended) from.Close();
  return bytes;
}

std::size_t Child::Unread(Stream stream) const {
  const Source& from = stream == Stream::kOutput ? output_ : error_;
  int bytes = 0;
  if (!from.is_open() || ioctl(from.fd(), FIONREAD, &bytes) != 0) return 0;
  return static_cast<std::size_t>(bytes);
}

void Child::AskAll() {
  for (const Stream stream : kStreams) Ask(stream);
}

void Child::Drain() {
  for (const Stream stream : kStreams) {
    while (take_(stream)) continue;
  }
}

bool Child::prints() const { return output_.is_open() || error_.is_open(); }

void Child::StopReading() {
  output_.Close();
  error_.Close();
}

void Child::Signal(int signal, bool group) const {
  if (pid_ > 0) kill(group ? -pid_ : pid_, signal);
}

bool Child::LeadsGroup() const { return pid_ > 0 && getpgid(pid_) == pid_; }

void Child::SignalAll(int signal) const { Signal(signal, LeadsGroup()); }

}  // namespace sirtaki::launch
