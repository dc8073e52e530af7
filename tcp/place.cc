#include "tcp/place.h"

#include <initializer_list>

#include "core/base/text.h"
#include "core/base/words.h"
#include "core/machine/cgroup.h"

namespace sirtaki::tcp {

using core::EnvironmentView;
using core::Status;
using core::StatusCode;

namespace {

constexpr int kMaxRanks = 1 << 20;
constexpr int kUsualPort = 29400;
constexpr std::size_t kShortestSecret = 16;

Status Wrong(const std::string& text) {
  return {StatusCode::kInvalidArgument, "a job over TCP: " + text};
}

struct Found {
  std::string name;
  std::string value;
};

std::optional<Found> FirstOf(const EnvironmentView& variables,
                             std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (auto value = variables.Find(name)) return Found{name, std::move(*value)};
  }
  return std::nullopt;
}

Status ReadNumber(const Found& found, int least, int most, int* number) {
  const auto read = core::NumberFrom(found.value, least, most);
  *number = read.value_or(least);
  if (read) return Status::Ok();
  return Wrong(found.name + "=" + core::Quoted(found.value) + " is no number from " +
               std::to_string(least) + " to " + std::to_string(most));
}

const std::initializer_list<const char*> kRankNames = {"RANK", "JOB_COMPLETION_INDEX",
                                                       "SLURM_PROCID"};
const std::initializer_list<const char*> kSizeNames = {"WORLD_SIZE", "SLURM_NTASKS"};

Status FindPort(const EnvironmentView& variables, int* port) {
  const auto found = FirstOf(variables, {"SIRTAKI_PORT", "MASTER_PORT"});
  *port = kUsualPort;
  if (!found) return Status::Ok();
  const bool is_torchruns =
      found->name == "MASTER_PORT" && variables.Find("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (Status status = ReadNumber(*found, 1, is_torchruns ? 65534 : 65535, port); !status.ok()) {
    return status;
  }
  if (is_torchruns) ++*port;
  return Status::Ok();
}

}  // namespace

Status FindSecret(const EnvironmentView& variables, std::string* secret) {
  std::string from = "SIRTAKI_SECRET";
  if (const auto value = variables.Find(from)) {
    *secret = *value;
  } else if (const auto file = variables.Find("SIRTAKI_SECRET_FILE")) {
    from = "the file " + core::Quoted(*file) + " of SIRTAKI_SECRET_FILE";
    auto text = core::ReadFile(*file);
    if (!text) return Wrong(from + " cannot be read");
    const std::size_t last = text->find_last_not_of(" \t\r\n");
    *secret = text->substr(0, last == std::string::npos ? 0 : last + 1);
  } else {
    return Wrong(
        "SIRTAKI_SECRET is not set, by which the ranks know each other. sirtakirun makes one for "
        "each "
        "job; started otherwise, give all ranks the same: export SIRTAKI_SECRET=$(openssl rand "
        "-hex "
        "32), or SIRTAKI_SECRET_FILE");
  }
  if (secret->size() >= kShortestSecret) return Status::Ok();
  return Wrong(from + " has " + std::to_string(secret->size()) +
               " characters, and needs at least " + std::to_string(kShortestSecret) +
               ": openssl rand -hex 32 makes one");
}

bool IsToldPlace(const EnvironmentView& variables) {
  const auto size = variables.Find("WORLD_SIZE");
  return size && *size != "1" && variables.Find("MASTER_ADDR") &&
         FirstOf(variables, {"RANK", "JOB_COMPLETION_INDEX"}).has_value();
}

Status FindPlace(const EnvironmentView& variables, Place* place) {
  Place found;
  const auto size = FirstOf(variables, kSizeNames);
  if (!size)
    return Wrong("WORLD_SIZE is not set, the number of ranks: sirtakirun and torchrun set it");
  if (Status status = ReadNumber(*size, 1, kMaxRanks, &found.size); !status.ok()) return status;
  const auto rank = FirstOf(variables, kRankNames);
  if (!rank) return Wrong("RANK is not set, this rank's number: sirtakirun and torchrun set it");
  if (Status status = ReadNumber(*rank, 0, found.size - 1, &found.rank); !status.ok())
    return status;
  if (found.size > 1) {
    const auto address = variables.Find("MASTER_ADDR");
    if (!address) return Wrong("MASTER_ADDR is not set, the name or address of rank 0's host");
    found.address = *address;
    Status status = FindPort(variables, &found.port);
    if (status.ok()) status = FindSecret(variables, &found.secret);
    if (!status.ok()) return status;
  }
  *place = std::move(found);
  return Status::Ok();
}

}  // namespace sirtaki::tcp
