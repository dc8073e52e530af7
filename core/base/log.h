// What the library tells whoever runs it: one line a message, on standard error, with time, level,
// rank and host; control characters in a message are escaped. log.cc is the only file that knows
// which logging library does it.
//
// Thread-safe. The sink is process-wide; which rank a line belongs to can be set for a thread, so
// that several ranks may live in one process.
#pragma once

#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>

namespace sirtaki::core {

enum class LogLevel : std::uint8_t { kTrace, kDebug, kInfo, kWarning, kError, kOff };
inline constexpr std::string_view kLogLevelNames[] = {"trace",   "debug", "info",
                                                      "warning", "error", "off"};

// The identity says who speaks. Until it is known, lines carry no rank.
struct LogIdentity {
  int rank = -1;
  std::string host;
};

struct LogSettings {
  LogLevel level = LogLevel::kWarning;  // and above
  bool show_time = true;
  LogIdentity identity;
};

// Replaces the settings of the process. Before the first call they are the defaults above.
void ConfigureLog(const LogSettings& settings);

// False for kOff, which is a setting and not a message's level.
bool LogEnabled(LogLevel level);

// One message; a level that is not enabled is dropped. Never throws, whatever happens to the sink.
void Log(LogLevel level, std::string_view text) noexcept;

// A message at level info that the run was asked for: it is shown wherever warnings are.
void LogAnswer(std::string_view text) noexcept;

// Receives finished lines, without the newline, one at a time. Called under a lock: it must not
// log.
using LogSink = std::function<void(LogLevel level, const std::string& line)>;

// Sends lines to `sink` instead of standard error (a test, a host program); null brings that back.
// The sink before is not called any more once this returns.
void SetLogSink(LogSink sink);

}  // namespace sirtaki::core

// SIRTAKI_LOG(kWarning, "tensor " << name << " waits"): the text is made only if the level is
// enabled.
#define SIRTAKI_LOG(level, text)                                                      \
  do {                                                                                \
    if (::sirtaki::core::LogEnabled(::sirtaki::core::LogLevel::level)) {              \
      std::ostringstream sirtaki_log_text;                                            \
      sirtaki_log_text << text; /* NOLINT: a chain of <<, so no parentheses */        \
      ::sirtaki::core::Log(::sirtaki::core::LogLevel::level, sirtaki_log_text.str()); \
    }                                                                                 \
  } while (false)
