// The flight record of a session's rank.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <utility>

#include "core/fork_guard.h"
#include "frameworks/session.h"
#include "frameworks/session_parts.h"
#include "sirtaki/version.h"

namespace sirtaki::frameworks {
namespace {

std::string Hexadecimal(std::uint64_t number) {
  char text[20];
  std::snprintf(text, sizeof text, "%llx", static_cast<unsigned long long>(number));
  return text;
}

std::string Version() {
  return std::to_string(SIRTAKI_VERSION_MAJOR) + "." + std::to_string(SIRTAKI_VERSION_MINOR) + "." +
         std::to_string(SIRTAKI_VERSION_PATCH);
}

}  // namespace

core::trace::FlightRecord Session::Describe(std::string why, core::Duration patience) const {
  core::trace::FlightRecord record;
  if (core::ForkGeneration() == fork_generation_) {
    const Call call(*this);
    if (call.has_parts() && parts_->engine) record = parts_->engine->Describe(patience);
  }
  record.rank = topology_.rank;
  record.size = topology_.size;
  record.host = topology_.host;
  record.pid = getpid();
  record.version = Version();
  record.session = Hexadecimal(token_);
  record.why = std::move(why);
  record.fault = fault();
  record.now = core::Clock::now();
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  record.unix_us = std::chrono::duration_cast<std::chrono::microseconds>(since).count();
  return record;
}

}  // namespace sirtaki::frameworks
