#include "launch/job/job_output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <system_error>

#include "core/base/text.h"

namespace sirtaki::launch {

using core::Status;
using core::StatusCode;

namespace {

// "2026-11-22 04:10:00.123", of this machine's time zone.
std::string TimeText() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  localtime_r(&now.tv_sec, &parts);
  std::array<char, 32> text{};
  const std::size_t length = std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S", &parts);
  std::snprintf(text.data() + length, text.size() - length, ".%03ld", now.tv_nsec / 1'000'000);
  return text.data();
}

bool IsOnePlace(int one, int other) {
  struct stat first {};
  struct stat second {};
  return fstat(one, &first) == 0 && fstat(other, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

int DescriptorOf(Stream stream) {
  return stream == Stream::kOutput ? STDOUT_FILENO : STDERR_FILENO;
}

// A descriptor that can be read when the stream can be written. The stream itself must not become
// one that does not block: other processes write there too.
Descriptor WhenWritable(Stream stream) {
  Descriptor events(epoll_create1(EPOLL_CLOEXEC));
  epoll_event event{EPOLLOUT, {}};
  const int fd = DescriptorOf(stream);
  if (epoll_ctl(events.get(), EPOLL_CTL_ADD, fd, &event) == 0) return events;
  if (errno != EPERM) {
    throw std::system_error(errno, std::generic_category(), "cannot wait for the standard streams");
  }
  return Descriptor(eventfd(1, EFD_CLOEXEC));  // it is a file, which can always be written
}

}  // namespace

JobOutput::JobOutput(Loop* loop)
    : loop_(loop),
      output_(loop, [this] { Write(Stream::kOutput); }),
      error_(loop, [this] { Write(Stream::kError); }) {
  output_.Open(WhenWritable(Stream::kOutput));
  error_.Open(WhenWritable(Stream::kError));
}

Status JobOutput::Open(const LaunchOptions& options, int ranks, bool again,
                       const core::EnvironmentView& env) {
  timestamps_ = options.prefix_timestamp;
  if (!env.Find("NO_COLOR") && env.Find("TERM").value_or("dumb") != "dumb") {
    colors_ = {isatty(STDOUT_FILENO) == 1, isatty(STDERR_FILENO) == 1};
  }
  one_place_ = IsOnePlace(STDOUT_FILENO, STDERR_FILENO);
  folder_ = options.output_folder;
  again_ = again;
  Status status;
  for (int rank = 0; rank < ranks && status.ok(); ++rank) status = AddRank();
  return status;
}

Status JobOutput::AddRank() {
  OfRank& added = of_.emplace_back();
  if (folder_.empty()) return Status::Ok();
  const std::string folder = folder_ + "/rank." + std::to_string(of_.size() - 1);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return {StatusCode::kBackend,
            "--output-filename: " + core::Quoted(folder) + " cannot be made: " + error.message()};
  }
  Status status;
  for (const Stream stream : kStreams) {
    if (status.ok()) status = OpenFile(folder, stream, again_, &added.files[Index(stream)]);
  }
  return status;
}

Status JobOutput::OpenFile(const std::string& folder, Stream stream, bool again, Descriptor* out) {
  const std::string path = folder + (stream == Stream::kOutput ? "/stdout" : "/stderr");
  *out = Descriptor(
      open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (again ? O_APPEND : O_TRUNC), 0666));
  if (out->valid()) return Status::Ok();
  return {StatusCode::kBackend, "--output-filename: " + core::Quoted(path) +
                                    " cannot be written: " + std::strerror(errno)};
}

std::string JobOutput::Prefix(int rank, Stream stream) const {
  std::string prefix = "[" + std::to_string(rank) + "]";
  prefix = TimePrefix() + prefix;
  if (colors_[Index(stream)])
    prefix = "\033[3" + std::to_string(1 + rank % 6) + "m" + prefix + "\033[0m";
  return prefix + " ";
}

std::string JobOutput::TimePrefix() const { return timestamps_ ? TimeText() + " " : ""; }

void JobOutput::Append(int rank, Stream stream, std::string_view bytes) {
  OfRank& of = of_[At(rank)];
  if (stream == Stream::kError) of.errors.Append(bytes);
  if (!folder_.empty()) {
    if (of.files[Index(stream)].valid()) WriteFile(of.files[Index(stream)].get(), bytes);
    written_.emplace_back(rank, bytes.size());
    return;
  }
  Put(stream, of.lines[Index(stream)].Append(bytes, Prefix(rank, stream)), rank, bytes.size());
}

void JobOutput::Put(Stream stream, std::string lines, int rank, std::size_t bytes) {
  if (!lines.empty() && !lost_[Index(stream)]) {
    waiting_[Index(stream)].push_back({std::move(lines), rank, bytes});
  } else if (bytes > 0) {
    written_.emplace_back(rank, bytes);  // as much as can be
  }
}

void JobOutput::Finish(int rank) {
  for (const Stream stream : kStreams) {
    Put(stream, of_[At(rank)].lines[Index(stream)].Finish(Prefix(rank, stream)), rank, 0);
    of_[At(rank)].files[Index(stream)].Close();
  }
}

void JobOutput::AppendOfLauncher(Stream stream, std::string_view bytes) {
  Put(stream, launcher_lines_[Index(stream)].Append(bytes, ""), -1, 0);
}

void JobOutput::FinishLauncher() {
  for (const Stream stream : kStreams) {
    Put(stream, launcher_lines_[Index(stream)].Finish(""), -1, 0);
  }
}

void JobOutput::Tell(const std::string& text) {
  waiting_[Index(Stream::kError)].push_back({TimePrefix() + "sirtakirun: " + text + "\n", -1, 0});
}

void JobOutput::WriteFile(int fd, std::string_view bytes) {
  while (!bytes.empty() && !file_failed_) {
    const Transfer transfer = WriteSome(fd, bytes);
    bytes.remove_prefix(transfer.bytes);
    if (!transfer.ended) continue;
    file_failed_ = true;
    failed_ = true;
    std::fprintf(stderr,
                 "sirtakirun: --output-filename: writing failed: %s; later output is lost\n",
                 transfer.why.message().c_str());
  }
}

bool JobOutput::Wants(Stream stream) const {
  if (!HasWaiting(stream)) return false;
  return !one_place_ || stream == turn_ || !HasWaiting(Other(stream));
}

void JobOutput::WriteWhenReady() {
  if (Wants(Stream::kOutput)) output_.Ask();
  if (Wants(Stream::kError)) error_.Ask();
}

void JobOutput::WriteLast(core::TimePoint until) {
  while (HasWaiting(Stream::kError) && core::Clock::now() < until) {
    WriteWhenReady();
    loop_->Run(until);
  }
}

void JobOutput::Write(Stream stream) {
  // It may no longer be its turn, and what both write to may be full again.
  pollfd writable{DescriptorOf(stream), POLLOUT, 0};
  if (!Wants(stream) || poll(&writable, 1, 0) != 1) return;
  std::deque<Piece>& waiting = waiting_[Index(stream)];
  Piece& piece = waiting.front();
  // No more than a pipe that can be written has room for, and whole lines if one fits.
  std::string_view part = std::string_view(piece.text).substr(0, PIPE_BUF);
  const std::size_t end = part.find_last_of("\r\n");
  if (end != std::string_view::npos) part = part.substr(0, end + 1);
  const Transfer transfer = WriteSome(DescriptorOf(stream), part);
  if (transfer.ended) return Lose(stream, transfer.why.message());
  const bool ends_line =
      transfer.bytes > 0 && (part[transfer.bytes - 1] == '\n' || part[transfer.bytes - 1] == '\r');
  turn_ = ends_line ? Other(stream) : stream;
  piece.text.erase(0, transfer.bytes);
  if (piece.text.empty()) {
    if (piece.bytes > 0) written_.emplace_back(piece.rank, piece.bytes);
    waiting.pop_front();
  }
  WriteWhenReady();
}

void JobOutput::Lose(Stream stream, const std::string& why) {
  lost_[Index(stream)] = true;
  for (const Piece& piece : waiting_[Index(stream)]) {
    if (piece.bytes > 0) written_.emplace_back(piece.rank, piece.bytes);  // it may go on
  }
  waiting_[Index(stream)].clear();
  if (why.empty()) return;
  failed_ = true;
  std::fprintf(stderr, "sirtakirun: standard %s: %s; later output is lost\n",
               stream == Stream::kOutput ? "output" : "error", why.c_str());
}

void JobOutput::Discard() {
  for (const Stream stream : kStreams) Lose(stream, "");
}

}  // namespace sirtaki::launch
