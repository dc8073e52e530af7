#include "core/base/log.h"

#include <spdlog/details/null_mutex.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <utility>

#include "core/base/text.h"
#include "core/base/thread_annotations.h"

namespace sirtaki::core {
namespace {

// The levels are in the order of LogLevel. spdlog's have the same numbers, up to error.
constexpr spdlog::level::level_enum kSpdlogLevels[] = {spdlog::level::trace, spdlog::level::debug,
                                                       spdlog::level::info,  spdlog::level::warn,
                                                       spdlog::level::err,   spdlog::level::off};
static_assert(std::size(kSpdlogLevels) == std::size(kLogLevelNames));

LogLevel FromSpdlog(spdlog::level::level_enum level) {
  return static_cast<LogLevel>(std::min(level, spdlog::level::err));
}

// Hands finished lines to a function. Logger's lock serves for the sinks too.
class FunctionSink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  explicit FunctionSink(LogSink function) : function_(std::move(function)) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    function_(FromSpdlog(message.level), std::string(line.data(), line.size()));
  }
  void flush_() override {}

  LogSink function_;
};

// "[3@node7] ", or nothing before the rank is known.
std::string Prefix(const LogIdentity& identity) {
  if (identity.rank < 0) return {};
  std::string prefix = "[" + std::to_string(identity.rank);
  if (!identity.host.empty()) prefix += "@" + identity.host;
  return prefix + "] ";
}

class Logger {
 public:
  // Never destroyed: threads may log while the process ends.
  static Logger& Get() {
    static Logger* const logger = new Logger;
    return *logger;
  }

  bool Enabled(LogLevel level) const {
    return level != LogLevel::kOff && level >= level_.load(std::memory_order_relaxed);
  }

  void Configure(const LogSettings& settings) {
    MutexLock lock(mutex_);
    level_.store(settings.level, std::memory_order_relaxed);
    prefix_ = Prefix(settings.identity);
    show_time_ = settings.show_time;
    Rebuild();
  }

  void SetSink(LogSink sink) {
    MutexLock lock(mutex_);
    function_ = std::move(sink);
    Rebuild();
  }

  void Write(LogLevel level, std::string_view text) {
    // Held until the line is out: once a sink was replaced it is never called again, and may go.
    MutexLock lock(mutex_);
    const std::string line = prefix_ + Escaped(text);  // one message, one line
    logger_->log(kSpdlogLevels[static_cast<std::size_t>(level)],
                 spdlog::string_view_t(line.data(), line.size()));
  }

 private:
  Logger() {
    MutexLock lock(mutex_);
    Rebuild();
  }

  void Rebuild() SIRTAKI_REQUIRES(mutex_) {
    std::shared_ptr<spdlog::sinks::sink> sink;
    std::string end_of_line = spdlog::details::os::default_eol;
    if (function_) {
      sink = std::make_shared<FunctionSink>(function_);
      end_of_line.clear();
    } else {
      sink = std::make_shared<spdlog::sinks::stderr_sink_st>();
    }
    const std::string pattern =
        show_time_ ? "[%Y-%m-%d %H:%M:%S.%f] [sirtaki] [%l] %v" : "[sirtaki] [%l] %v";
    sink->set_formatter(std::make_unique<spdlog::pattern_formatter>(
        pattern, spdlog::pattern_time_type::local, end_of_line));
    auto logger = std::make_unique<spdlog::logger>("sirtaki", std::move(sink));
    logger->set_level(spdlog::level::trace);  // ours is checked before
    logger->flush_on(spdlog::level::trace);   // the last line before a crash counts most
    logger_ = std::move(logger);
  }

  std::atomic<LogLevel> level_{LogLevel::kWarning};
  Mutex mutex_;
  std::string prefix_ SIRTAKI_GUARDED_BY(mutex_);
  bool show_time_ SIRTAKI_GUARDED_BY(mutex_) = true;
  LogSink function_ SIRTAKI_GUARDED_BY(mutex_);
  std::unique_ptr<spdlog::logger> logger_ SIRTAKI_GUARDED_BY(mutex_);
};

void WriteIf(LogLevel enabled, LogLevel level, std::string_view text) noexcept {
  if (!LogEnabled(enabled)) return;
  try {
    Logger::Get().Write(level, text);
  } catch (...) {  // NOLINT: a line that cannot be written must not end a training
  }
}

}  // namespace

void ConfigureLog(const LogSettings& settings) { Logger::Get().Configure(settings); }

bool LogEnabled(LogLevel level) { return Logger::Get().Enabled(level); }

void Log(LogLevel level, std::string_view text) noexcept { WriteIf(level, level, text); }

void LogAnswer(std::string_view text) noexcept {
  WriteIf(LogLevel::kWarning, LogLevel::kInfo, text);
}

void SetLogSink(LogSink sink) { Logger::Get().SetSink(std::move(sink)); }

}  // namespace sirtaki::core
