// The ranks tell each other greetings at init, and from these the same follows on all of them.
// Pure, except Greet, which gathers what is known of this process.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/config/config.h"
#include "core/machine/cores.h"

namespace sirtaki::session {

struct Greeting {
  core::Status status;  // of parsing the options
  core::Config config;
  core::CpuShare cpus;
  std::uint64_t token = 0;  // random; rank 0's tells this session's messages from those of another
  core::TimePoint clock{};  // rank 0's is time 0 of what is recorded
};

Greeting Greet(const core::Status& parsed, const core::Config& config);

// The bytes survive any damage (kProtocol).
std::string Serialize(const Greeting& greeting);
core::Status Deserialize(std::string_view bytes, Greeting* greeting);

std::string SerializeStatus(const core::Status& status);

// core::FirstFailure of what SerializeStatus has given.
core::Status FirstFailure(std::span<const std::string> serialized_by_rank);

}  // namespace sirtaki::session
