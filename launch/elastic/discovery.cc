#include "launch/elastic/discovery.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <utility>

#include "core/base/text.h"
#include "launch/base/run_commands.h"
#include "launch/base/shell_text.h"
#include "launch/job/failure_judgement.h"

namespace sirtaki::launch {

using core::Clock;
using core::Status;
using core::StatusCode;
using core::TimePoint;

namespace {

constexpr auto kPatience = std::chrono::seconds(30);  // with a run of the script
constexpr std::size_t kMostPrinted = std::size_t{1} << 20;

std::string CalledScript(const std::string& script) {
  return "--host-discovery-script " + core::Quoted(script);
}

// Horovod gives it to a shell, with its arguments. A file is run as it is, whatever its name.
Command CommandOf(const std::string& script) {
  const bool has_blank = script.find_first_of(" \t") != std::string::npos;
  Command command;
  command.words = {script};
  if (has_blank && access(script.c_str(), F_OK) != 0) command.words = {"/bin/sh", "-c", script};
  command.input = Command::kNoInput;
  return command;
}

// The text is empty where the script has ended well.
std::string WhyFailed(const EndMessage& end, bool in_time, const std::string& error) {
  if (!in_time) return "takes longer than " + core::DurationText(kPatience);
  if (end.kind == EndKind::kExited && end.value == 0) return "";
  std::string why = EndText(end);
  const std::string_view said = Trimmed(error);
  if (!said.empty()) why.append(": ").append(said);
  return why;
}

}  // namespace

Status ParseDiscovered(std::string_view text, const std::string& script, int slots_per_host,
                       HostList* out) {
  std::string lines;
  for (const std::string_view line : Split(text, '\n')) {
    const std::string_view host = Trimmed(line.substr(0, line.find('#')));
    if (host.empty()) continue;
    lines.append(host);
    if (host.find_first_of(":= ") == std::string_view::npos) {
      lines.append(":").append(std::to_string(slots_per_host));
    }
    lines.append("\n");
  }
  if (lines.empty()) {
    out->clear();
    return Status::Ok();
  }
  const Status status = ParseHostFile(lines, script, out);
  return status.ok() ? status
                     : Status(status.code(), "--host-discovery-script " + status.message());
}

Status DiscoverOnce(const std::string& script, int slots_per_host, HostList* out) {
  int signal = 0;
  const CommandOutcome outcome = RunCommands({CommandOf(script)}, kPatience, 1, &signal).front();
  if (signal != 0) raise(signal);  // nothing has begun that must be ended first
  const std::string why = outcome.why.empty()
                              ? WhyFailed(outcome.end, outcome.in_time, outcome.error)
                              : "cannot be started: " + outcome.why;
  if (!why.empty()) return {StatusCode::kBackend, CalledScript(script) + " " + why};
  return ParseDiscovered(outcome.output, script, slots_per_host, out);
}

Discovery::Discovery(Loop* loop, std::string script, int slots_per_host, core::Duration interval,
                     std::function<void(const std::string&)> complain)
    : script_(std::move(script)),
      slots_per_host_(slots_per_host),
      interval_(interval),
      complain_(std::move(complain)),
      child_(loop,
             [this](Stream stream) {
               std::string& text = stream == Stream::kOutput ? printed_ : said_;
               const std::string more = child_.Read(stream);
               text.append(more, 0, kMostPrinted - text.size());
               return !more.empty() && text.size() < kMostPrinted;
             }),
      until_(script_.empty() ? TimePoint::max() : Clock::now() + interval_) {}

Discovery::~Discovery() {
  if (child_.running()) child_.Signal(SIGKILL, /*group=*/true);
}

void Discovery::CheckTimes(TimePoint now) {
  if (child_.running()) child_.AskAll();
  if (now < until_) return;
  if (child_.running()) {
    killed_ = true;
    until_ = TimePoint::max();
    return child_.Signal(SIGKILL, /*group=*/true);
  }
  killed_ = false;
  printed_.clear();
  said_.clear();
  Command command = CommandOf(script_);
  command.own_group = true;
  int error = 0;
  const Status status = child_.Start(command, &error);
  until_ = now + (status.ok() ? core::Duration(kPatience) : interval_);
  if (!status.ok())
    return Complain(CalledScript(script_) + " cannot be started: " + status.message());
  child_.AskAll();
}

std::optional<HostList> Discovery::TakeHosts(TimePoint now) {
  if (!child_.running()) return std::nullopt;
  const auto end = child_.Ended();
  if (!end) return std::nullopt;
  child_.Drain();
  child_.StopReading();
  until_ = now + interval_;
  HostList hosts;
  std::string why = WhyFailed(*end, !killed_, said_);
  if (!why.empty()) {
    why = CalledScript(script_) + " " + why;
  } else {
    const Status status = ParseDiscovered(printed_, script_, slots_per_host_, &hosts);
    if (!status.ok()) why = status.message();
  }
  if (!why.empty()) {
    Complain(why);
    return std::nullopt;
  }
  complaint_.clear();
  return hosts;
}

void Discovery::Complain(const std::string& why) {
  if (std::exchange(complaint_, why) == why) return;
  complain_(why + "; the hosts are those from before");
}

}  // namespace sirtaki::launch
