// What it means when a command over ssh ends badly, and what helps. Pure.
#pragma once

#include <string>
#include <string_view>

#include "launch/base/rank_messages.h"
#include "launch/options/options.h"

namespace sirtaki::launch {

// The exit code of ssh where ssh itself has failed.
inline constexpr int kOfSsh = 255;

// The last line that says something, without bytes that a terminal would take for more.
std::string LastLine(std::string_view text);

// The command that logs in on the host, as one would type it.
std::string SshByHand(const LaunchOptions& options, const std::string& host);

// Why ssh itself has failed, by what it printed: cause and cure.
std::string JudgeSsh(const LaunchOptions& options, const std::string& host,
                     const std::string& error);

// Whether ssh has failed by what passes when a host that is starting is up: its name, its address, its
// ssh server.
bool MayPass(const std::string& error);

// Why the sirtakirun at `self` there was not started, or is none that does what it is asked: cause
// and cure.
std::string JudgeSilence(const std::string& self, const EndMessage& end, const std::string& error);

}  // namespace sirtaki::launch
